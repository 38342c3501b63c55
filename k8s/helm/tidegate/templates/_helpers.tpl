{{- define "tidegate.name" -}}
{{- /* The chart's name is its alias, if the chart that depends on it gives one. */ -}}
{{- $alias := ternary "" (printf "-%s" .Chart.Name) (eq .Chart.Name "tidegate") -}}
{{- $name := .Values.name | default (print .Release.Name $alias) -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,53}[a-z0-9])?$" $name) }}{{ fail (printf "the name %q cannot name a Service; set `name`" $name) }}{{ end -}}
{{- $name -}}
{{- end -}}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: {{ include "tidegate.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- /* Selects the pods with this release's sidecar, also in charts that depend on this one. */ -}}
{{- define "tidegate.sidecarSelector" -}}
tidegate/name: {{ include "tidegate.name" . | quote }}
{{- end -}}

{{- /* The metadata of an object: (list . name labels). */ -}}
{{- define "tidegate.metadata" -}}
{{- $root := index . 0 -}}
{{- $labels := dict "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version) "app.kubernetes.io/managed-by" $root.Release.Service -}}
{{- $labels = merge $labels (index . 2) (include "tidegate.selector" $root | fromYaml) $root.Values.labels -}}
name: {{ index . 1 | quote }}
namespace: {{ $root.Release.Namespace | quote }}
labels: {{- toYaml $labels | nindent 2 }}
{{- end -}}

{{- /* Half of a Kubernetes quantity of bytes: the rest is for connections and code. */ -}}
{{- define "tidegate.halfOfMemory" -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- $units := dict "" 1 "k" 1000 "M" 1000000 "G" 1000000000 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 -}}
{{- $half := mulf (trimSuffix $unit . | float64) (get $units $unit | default 0) 0.5 | int64 -}}
{{- if lt $half 1024 }}{{ fail (printf "sidecar.resources.limits.memory: found %s; expected a number with Ki, Mi, Gi, k, M or G, at least 2Ki" .) }}{{ end -}}
{{- $half -}}
{{- end -}}

{{- /* Seconds of a duration such as 10s or 1m30s, rounded up. */ -}}
{{- define "tidegate.seconds" -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ms|s|m|h|d)" . -1 -}}
{{- $unit := regexFind "[a-z]+$" . -}}
{{- $seconds = addf $seconds (mulf (trimSuffix $unit . | float64) (get (dict "ms" 0.001 "s" 1 "m" 60 "h" 3600 "d" 86400) $unit)) -}}
{{- end -}}
{{- ceil $seconds | int64 -}}
{{- end -}}

{{- /* The sidecar's container. */ -}}
{{- define "tidegate.sidecar" -}}
{{- $pod := (.Files.Get "files/sidecar.yaml" | fromYaml).spec.template.spec -}}
{{- $sidecar := mergeOverwrite (index $pod.initContainers 0) (pick .Values.sidecar "image" "imagePullPolicy" "envFrom" "securityContext") -}}
{{- with .Values.sidecar.resources }}{{ $_ := set $sidecar "resources" . }}{{ end -}}
{{- $_ := set $sidecar "env" (concat $sidecar.env (.Values.sidecar.env | default list)) -}}
{{- $mounts := list -}}
{{- range $sidecar.volumeMounts -}}
{{- if or (ne .name "tidegate-redis") $.Values.redis.secret }}{{ $mounts = append $mounts . }}{{ end -}}
{{- end -}}
{{- if .Values.tls.secret -}}
{{- $mounts = append $mounts (dict "name" "tidegate-tls" "mountPath" "/etc/tidegate-tls" "readOnly" true) -}}
{{- end -}}
{{- $_ := set $sidecar "volumeMounts" (concat $mounts (.Values.sidecar.volumeMounts | default list)) -}}
{{- toYaml $sidecar -}}
{{- end -}}

{{- /* The volumes of the sidecar. */ -}}
{{- define "tidegate.volumes" -}}
- name: tidegate
  configMap:
    name: {{ include "tidegate.name" . }}-tidegate
{{- with .Values.redis.secret }}
- name: tidegate-redis
  secret:
    secretName: {{ quote . }}
{{- end }}
{{- with .Values.tls.secret }}
- name: tidegate-tls
  secret:
    secretName: {{ quote . }}
{{- end }}
{{- end -}}

{{- /* Finds the container's probes that go through the proxy, and appends them to `probes` of the dictionary. Arguments: (list dictionary container). */ -}}
{{- define "tidegate.findProbes" -}}
{{- $found := index . 0 -}}
{{- $container := index . 1 -}}
{{- $ports := list "8080" -}}
{{- range $container.ports }}{{ if eq (toString .containerPort) "8080" }}{{ $ports = append $ports (get . "name") }}{{ end }}{{ end -}}
{{- range pick $container "startupProbe" "readinessProbe" "livenessProbe" -}}
{{- $request := .httpGet | default .grpc | default dict -}}
{{- if and (has (toString $request.port) $ports) (not $request.host) }}{{ $_ := set $found "probes" (append $found.probes .) }}{{ end -}}
{{- end -}}
{{- end -}}

{{- /*
Adds the sidecar to a workload, and returns it as YAML: (list . workload), where the first is the context of this chart
(.Subcharts.tidegate in a chart that depends on it) and the second is the workload's YAML. The first container is the app.
*/ -}}
{{- define "tidegate.inject" -}}
{{- $root := index . 0 -}}
{{- if not $root }}{{ fail "tidegate.inject: the first argument is no chart; expected .Subcharts.NAME with the name or alias of an enabled dependency" }}{{ end -}}
{{- $workload := index . 1 | fromYaml -}}
{{- with $workload.Error }}{{ fail (printf "tidegate.inject: the workload is not valid YAML: %s" .) }}{{ end -}}
{{- $what := printf "tidegate.inject: %s %s" $workload.kind (dig "metadata" "name" "" $workload) -}}
{{- $documents := 0 -}}
{{- range regexSplit "(?m)^---(\\s|$)" (index . 1) -1 }}{{ if fromYaml . }}{{ $documents = add1 $documents }}{{ end }}{{ end -}}
{{- if gt $documents 1 }}{{ fail (printf "tidegate.inject: found %d documents, separated by ---, the first of them %s %s; expected only the workload. Move the others out of the template that you pass" $documents $workload.kind (dig "metadata" "name" "" $workload)) }}{{ end -}}
{{- $template := dig "spec" "template" dict $workload -}}
{{- $pod := get $template "spec" | default dict -}}
{{- if not $pod.containers }}{{ fail (printf "%s has no spec.template.spec.containers; expected a Deployment, StatefulSet or DaemonSet" $what) }}{{ end -}}
{{- $volumes := include "tidegate.volumes" $root | fromYamlArray -}}
{{- range concat ($pod.initContainers | default list) $pod.containers -}}
{{- if eq .name "tidegate" }}{{ fail (printf "%s has a container tidegate already; remove it" $what) }}{{ end -}}
{{- end -}}
{{- range $pod.volumes | default list -}}
{{- $own := . -}}
{{- range $volumes }}{{ if eq .name $own.name }}{{ fail (printf "%s has a volume %s, which is the sidecar's; rename it" $what .name) }}{{ end }}{{ end -}}
{{- end -}}
{{- $config := include "tidegate.config" $root | fromToml -}}
{{- $probed := trimPrefix "tidegate.inject: " $what -}}
{{- $found := dict "probes" list -}}
{{- range concat ($pod.initContainers | default list) $pod.containers }}{{ include "tidegate.findProbes" (list $found .) }}{{ end -}}
{{- range $found.probes -}}
{{- if eq (dig "tls" "client_auth" "none" $config.listen) "require" }}{{ fail (printf "config: listen.tls.client_auth: the kubelet, which probes %s through the proxy, has no client certificate; expected \"optional\", or no probe of port 8080" $probed) }}{{ end -}}
{{- if eq (dig "proxy_protocol" "off" $config.listen) "require" }}{{ fail (printf "config: listen.proxy_protocol: the kubelet, which probes %s through the proxy, does not speak it; expected no probe of port 8080" $probed) }}{{ end -}}
{{- if $config.listen.tls -}}
{{- if .grpc }}{{ fail (printf "%s: gRPC probes of the kubelet do not use TLS, which port 8080 requires; expected httpGet" $what) }}{{ end -}}
{{- $_ := set .httpGet "scheme" (.httpGet.scheme | default "HTTPS") -}}
{{- end -}}
{{- end -}}
{{- /* The app's hook ends after the proxy, and the app has 25 s to shut down. */ -}}
{{- $drained := add (include "tidegate.seconds" $config.shutdown.delay) (include "tidegate.seconds" $config.shutdown.grace) 5 -}}
{{- $app := index $pod.containers 0 -}}
{{- $lifecycle := $app.lifecycle | default dict -}}
{{- $sleep := $drained -}}
{{- $keeps := $root.Values.sidecar.keepPreStop -}}
{{- if and $keeps (or (not $lifecycle.preStop) (dig "preStop" "sleep" false $lifecycle)) }}{{ fail (printf "sidecar.keepPreStop has no effect: container %s of %s has no preStop hook except a sleep" $app.name $what) }}{{ end -}}
{{- if not $lifecycle.preStop -}}
{{- $_ := set $lifecycle "preStop" (dict "sleep" (dict "seconds" $drained)) -}}
{{- else if $lifecycle.preStop.sleep -}}
{{- $sleep = max $drained (int64 $lifecycle.preStop.sleep.seconds) -}}
{{- $_ := set $lifecycle.preStop.sleep "seconds" $sleep -}}
{{- else if not $keeps -}}
{{- fail (printf "%s: container %s has a preStop hook of its own. It must wait %d s, until the proxy has ended, before what it does now. Then set sidecar.keepPreStop" $what $app.name $drained) -}}
{{- end -}}
{{- $_ := set $app "lifecycle" $lifecycle -}}
{{- $_ := set $pod "terminationGracePeriodSeconds" (max (int64 ($pod.terminationGracePeriodSeconds | default 0)) (add $sleep 25)) -}}
{{- $_ := set $pod "initContainers" (prepend ($pod.initContainers | default list) (include "tidegate.sidecar" $root | fromYaml)) -}}
{{- $_ := set $pod "volumes" (concat $volumes ($pod.volumes | default list)) -}}
{{- $metadata := $template.metadata | default dict -}}
{{- $_ := set $metadata "labels" (merge (include "tidegate.sidecarSelector" $root | fromYaml) (dict "tidegate" "sidecar") ($metadata.labels | default dict)) -}}
{{- /* Policies are reloaded; other settings need new pods. */ -}}
{{- $_ := set $metadata "annotations" (merge (dict "tidegate/config" (include "tidegate.configHash" $root)) ($metadata.annotations | default dict)) -}}
{{- $_ := set $template "metadata" $metadata -}}
{{- toYaml $workload -}}
{{- end -}}
