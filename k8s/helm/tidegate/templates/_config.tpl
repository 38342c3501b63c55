{{- /* config.toml: the values, then the keys of `config`. */ -}}
{{- define "tidegate.config" -}}
{{- $own := fromToml .Values.config -}}
{{- with $own.Error }}{{ fail (printf "config: not valid TOML: %s" .) }}{{ end -}}
{{- $redis := dig "store" "redis" dict $own -}}
{{- range list
  (list "trustedProxies" .Values.trustedProxies "client.trusted_proxies" (dig "client" "trusted_proxies" nil $own))
  (list "redis.url" .Values.redis.url "store.redis.url or urls" (or $redis.url $redis.urls))
  (list "redis.username" .Values.redis.username "store.redis.username or username_file" (or $redis.username $redis.username_file))
  (list "redis.keyPrefix" .Values.redis.keyPrefix "store.redis.key_prefix" $redis.key_prefix)
  (list "redis.secret" .Values.redis.secret "store.redis.password_file" (and $redis.password_file (not (contains "/etc/tidegate-redis/" .Values.config))))
  (list "tls.secret" .Values.tls.secret "listen.tls.cert" (and (dig "listen" "tls" "cert" nil $own) (not (contains "/etc/tidegate-tls/" .Values.config))))
  (list "replicas" (and (eq .Values.kind "None") (hasKey .Values "replicas")) "store.redis.instances" $redis.instances)
  (list "app.port" (dig "app" "port" nil (merge dict .Values)) "upstream.url" (dig "upstream" "url" nil $own)) -}}
{{- if and (index . 1) (index . 3) }}{{ fail (printf "%s has no effect, because config sets %s; remove one" (index . 0) (index . 2)) }}{{ end -}}
{{- end -}}
{{- range .Values.trustedProxies -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])" -}}
{{- $network := printf "^(%s([.]%s){3}(/(3[0-2]|[12]?[0-9]))?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?)$" $octet $octet -}}
{{- if not (regexMatch $network .) }}{{ fail (printf "trustedProxies: found %q; expected an address or a network such as 10.0.0.0/8" .) }}{{ end -}}
{{- end -}}
{{- $tls := or .Values.tls.secret (dig "listen" "tls" false $own) -}}
{{- $config := dict "listen" (dict "address" "[::]:8080") -}}
{{- if .Values.tls.secret }}{{ $_ := set $config.listen "tls" (dict "cert" "/etc/tidegate-tls/tls.crt" "key" "/etc/tidegate-tls/tls.key") }}{{ end -}}
{{- $_ := set $config "upstream" (dict "url" (printf "http://127.0.0.1:%d" (int64 (dig "app" "port" 3000 (merge dict .Values))))) -}}
{{- /* Clients that connect directly: one client's WebSockets must not take all upstream connections. */ -}}
{{- if and $tls (not .Values.trustedProxies) }}{{ $_ := set $config.upstream "max_tunnels_per_client" 64 }}{{ end -}}
{{- $_ := set $config "client" (dict "trusted_proxies" .Values.trustedProxies) -}}
{{- $_ := set $config "store" (dict "kind" "memory") -}}
{{- with (include "tidegate.sidecar" . | fromYaml).resources.limits -}}
{{- with .memory }}{{ $_ := set $config.store "memory" (dict "max_bytes" (printf "%sB" (include "tidegate.halfOfMemory" (toString .)))) }}{{ end -}}
{{- end -}}
{{- if or .Values.redis.secret $redis (eq (dig "store" "kind" "memory" $own) "redis") -}}
{{- $connection := dict "key_prefix" (.Values.redis.keyPrefix | default (include "tidegate.name" .)) -}}
{{- if .Values.redis.secret -}}
{{- $_ := set $connection "password_file" "/etc/tidegate-redis/password" -}}
{{- if not $redis.username_file }}{{ $_ := set $connection "username" (hasKey .Values.redis "username" | ternary .Values.redis.username "tidegate") }}{{ end -}}
{{- if not $redis.urls }}{{ $_ := set $connection "url" (.Values.redis.url | default "redis://redis:6379/0") }}{{ end -}}
{{- end -}}
{{- $scaling := .Values.autoscaling | default dict -}}
{{- $instances := ternary ($scaling.maxReplicas | default 10) (hasKey .Values "replicas" | ternary .Values.replicas 2) ($scaling.enabled | default false) -}}
{{- $_ := set $connection "instances" (max 1 (int64 $instances)) -}}
{{- $config = mergeOverwrite $config (dict "store" (dict "kind" "redis" "redis" $connection)) -}}
{{- end -}}
{{- $_ := set $config "admin" (dict "probes" "[::]:9091") -}}
{{- $_ := set $config "shutdown" (dict "delay" "10s" "grace" "20s") -}}
{{- if include "tidegate.policies" . }}{{ $_ := set $config "include" (list "policies.toml") }}{{ end -}}
{{- $config = mergeOverwrite $config $own -}}
{{- /* What would not fit the pod. */ -}}
{{- if not (hasSuffix ":8080" $config.listen.address) }}{{ fail (printf "config: listen.address: found %q; expected port 8080, which the Service and the probes use" $config.listen.address) }}{{ end -}}
{{- if not (hasSuffix ":9091" $config.admin.probes) }}{{ fail (printf "config: admin.probes: found %q; expected port 9091, which the probes use" $config.admin.probes) }}{{ end -}}
{{- if and .Values.redis.secret (ne $config.store.kind "redis") }}{{ fail "config: store.kind is not \"redis\", so redis.secret has no effect; set redis.secret to \"\"" }}{{ end -}}
{{- if and .Values.policies (not (has "policies.toml" ($config.include | default list))) }}{{ fail "config: include: without \"policies.toml\", the value `policies` has no effect" }}{{ end -}}
{{- if and .Values.redis.secret (contains "@" (pick $config.store.redis "url" "urls" | toJson)) }}{{ fail "the URL of Redis holds a login, which must not be in a ConfigMap; expected it in redis.username and in the Secret redis.secret" }}{{ end -}}
{{- if and (hasKey .Values "enabled") (not .Values.enabled) }}{{ fail "enabled: false has no effect here; expected it in a chart whose dependency has a `condition` that names it" }}{{ end -}}
{{- toToml $config -}}
{{- end -}}

{{- /* policies.toml, or nothing: the exemption of the probes, and the policies of the value or of the sample. */ -}}
{{- define "tidegate.policies" -}}
{{- $own := fromToml .Values.config -}}
{{- $file := fromToml .Values.policies -}}
{{- with $file.Error }}{{ fail (printf "policies: not valid TOML: %s" .) }}{{ end -}}
{{- $sample := (.Files.Get "files/policies.toml" | fromToml).policy -}}
{{- $exemption := first $sample -}}
{{- $policies := or .Values.policies $own.policy | empty | ternary (rest $sample) $file.policy | default list -}}
{{- $names := list -}}
{{- range concat $policies ($own.policy | default list) }}{{ $names = append $names .name }}{{ end -}}
{{- $paths := include "tidegate.probePaths" . | fromJsonArray -}}
{{- if and $paths (not (has $exemption.name $names)) -}}
{{- $_ := set $exemption.match "path" $paths -}}
{{- $policies = prepend $policies $exemption -}}
{{- end -}}
{{- $_ := set $file "policy" $policies -}}
{{- if hasKey $own "include" | ternary (has "policies.toml" ($own.include | default list)) (not (empty $policies)) }}{{ toToml $file }}{{ end -}}
{{- end -}}

{{- /* The paths of the app's probes through the proxy, as JSON. The probes of another chart's workload are unknown here. */ -}}
{{- define "tidegate.probePaths" -}}
{{- $paths := list "/healthz" -}}
{{- if ne .Values.kind "None" -}}
{{- $paths = list -}}
{{- $found := dict "probes" list -}}
{{- include "tidegate.findProbes" (list $found (index (include "tidegate.workload" . | fromYaml).spec.template.spec.containers 0)) -}}
{{- range $found.probes }}{{ with .httpGet }}{{ $paths = append $paths (.path | default "/" | splitList "?" | first) }}{{ end }}{{ end -}}
{{- end -}}
{{- $paths | uniq | sortAlpha | toJson -}}
{{- end -}}

{{- /* Changes with each setting that needs new pods. */ -}}
{{- define "tidegate.configHash" -}}
{{- $config := include "tidegate.config" . | fromToml -}}
{{- $redis := dig "store" "redis" dict $config -}}
{{- $_ := unset $redis "instances" -}}
{{- omit $config "policy" "include" | toJson | sha256sum | trunc 16 -}}
{{- end -}}

{{- /* https or http: what clients and probes of the proxy's port speak. */ -}}
{{- define "tidegate.scheme" -}}
{{- ternary "https" "http" (hasKey (include "tidegate.config" . | fromToml).listen "tls") -}}
{{- end -}}
