{{- define "tidegate.selector" -}}
app.kubernetes.io/name: {{ .Values.name }}
{{- end -}}

{{- /* The metadata of an object: (list . name labels). */ -}}
{{- define "tidegate.metadata" -}}
{{- $root := index . 0 -}}
{{- $labels := merge (dict) (index . 2) $root.Values.labels -}}
name: {{ index . 1 }}
{{- with $labels }}
labels: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The pod that the kustomize component patches into a workload. */ -}}
{{- define "tidegate.pod" -}}
{{- (.Files.Get "files/sidecar.yaml" | fromYaml).spec.template | toYaml -}}
{{- end -}}

{{- /* The native sidecar, an init container. */ -}}
{{- define "tidegate.sidecar" -}}
{{- $sidecar := index (include "tidegate.pod" . | fromYaml).spec.initContainers 0 -}}
{{- $_ := set $sidecar "image" .Values.sidecar.image -}}
{{- with .Values.sidecar.resources }}{{ $_ := set $sidecar "resources" . }}{{ end -}}
{{- $mounts := list -}}
{{- range $sidecar.volumeMounts -}}
{{- if or (ne .name "tidegate-redis") $.Values.redis.secret }}{{ $mounts = append $mounts . }}{{ end -}}
{{- end -}}
{{- if .Values.tls.secret -}}
{{- $mounts = prepend $mounts (dict "name" "tls" "mountPath" "/etc/tidegate-tls" "readOnly" true) -}}
{{- end -}}
{{- $_ := set $sidecar "volumeMounts" $mounts -}}
{{- toYaml $sidecar -}}
{{- end -}}

{{- /* The volumes of the sidecar. */ -}}
{{- define "tidegate.volumes" -}}
{{- with .Values.tls.secret }}
- name: tls
  secret:
    secretName: {{ . }}
{{- end }}
- name: tidegate
  configMap:
    name: tidegate
{{- with .Values.redis.secret }}
- name: tidegate-redis
  secret:
    secretName: {{ . }}
{{- end }}
{{- end -}}

{{- /* The app's `preStop` sleep, which lets the proxy end first. */ -}}
{{- define "tidegate.appLifecycle" -}}
{{- (index (.Files.Get "files/app.yaml" | fromYamlArray) 1).value | toYaml -}}
{{- end -}}
