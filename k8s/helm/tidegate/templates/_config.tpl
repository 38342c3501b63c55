{{- /* config.toml: the values, then the keys of `config`. */ -}}
{{- define "tidegate.config" -}}
{{- $own := fromToml .Values.config -}}
{{- with $own.Error }}{{ fail (printf "config: not valid TOML: %s" .) }}{{ end -}}
{{- $redis := dig "store" "redis" dict $own -}}
{{- range list
  (list "trustedProxies" .Values.trustedProxies "client.trusted_proxies" (dig "client" "trusted_proxies" nil $own))
  (list "redis.url" .Values.redis.url "store.redis.url or urls" (or $redis.url $redis.urls))
  (list "redis.username" .Values.redis.username "store.redis.username" $redis.username)
  (list "redis.keyPrefix" .Values.redis.keyPrefix "store.redis.key_prefix" $redis.key_prefix)
  (list "app.port" (dig "app" "port" nil (merge dict .Values)) "upstream.url" (dig "upstream" "url" nil $own)) -}}
{{- if and (index . 1) (index . 3) }}{{ fail (printf "%s has no effect, because config sets %s; remove one" (index . 0) (index . 2)) }}{{ end -}}
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
{{- if .Values.redis.secret -}}
{{- $redis := dict "username" (hasKey .Values.redis "username" | ternary .Values.redis.username "tidegate") "password_file" "/etc/tidegate-redis/password" -}}
{{- if not (dig "store" "redis" "urls" false $own) }}{{ $_ := set $redis "url" (.Values.redis.url | default "redis://redis:6379/0") }}{{ end -}}
{{- $_ := set $redis "key_prefix" (.Values.redis.keyPrefix | default (include "tidegate.name" .)) -}}
{{- $scaling := .Values.autoscaling | default dict -}}
{{- $instances := ternary ($scaling.maxReplicas | default 10) (hasKey .Values "replicas" | ternary .Values.replicas 2) ($scaling.enabled | default false) -}}
{{- $_ := set $redis "instances" (max 1 (int64 $instances)) -}}
{{- $config = mergeOverwrite $config (dict "store" (dict "kind" "redis" "redis" $redis)) -}}
{{- end -}}
{{- $_ := set $config "admin" (dict "probes" "[::]:9091") -}}
{{- $_ := set $config "shutdown" (dict "delay" "10s" "grace" "20s") -}}
{{- if include "tidegate.policies" . }}{{ $_ := set $config "include" (list "policies.toml") }}{{ end -}}
{{- $config = mergeOverwrite $config $own -}}
{{- /* What would not fit the pod. */ -}}
{{- if not (hasSuffix ":8080" $config.listen.address) }}{{ fail (printf "config: listen.address: found %q; expected port 8080, which the Service and the probes use" $config.listen.address) }}{{ end -}}
{{- if not (hasSuffix ":9091" $config.admin.probes) }}{{ fail (printf "config: admin.probes: found %q; expected port 9091, which the probes use" $config.admin.probes) }}{{ end -}}
{{- if and .Values.redis.secret (ne $config.store.kind "redis") }}{{ fail "config: store.kind is not \"redis\", so redis.secret has no effect; set redis.secret to \"\"" }}{{ end -}}
{{- if and (include "tidegate.policies" .) (not (has "policies.toml" $config.include)) }}{{ fail "config: include: without \"policies.toml\", the value `policies` has no effect" }}{{ end -}}
{{- if and (ne .Values.kind "None") (ne (dig "app" "readinessPath" "/healthz" (merge dict .Values)) "") -}}
{{- if eq (dig "listen" "tls" "client_auth" "none" $config) "require" }}{{ fail "config: listen.tls.client_auth: the kubelet, which probes the app through the proxy, has no client certificate; expected \"optional\", or app.readinessPath \"\"" }}{{ end -}}
{{- if eq (dig "listen" "proxy_protocol" "off" $config) "require" }}{{ fail "config: listen.proxy_protocol: the kubelet, which probes the app through the proxy, does not speak it; set app.readinessPath to \"\"" }}{{ end -}}
{{- end -}}
{{- toToml $config -}}
{{- end -}}

{{- /* policies.toml, or nothing. */ -}}
{{- define "tidegate.policies" -}}
{{- $own := fromToml .Values.config -}}
{{- if .Values.policies -}}
{{- .Values.policies -}}
{{- else if not (or (hasKey $own "policy") (hasKey $own "include")) -}}
{{- $path := dig "app" "readinessPath" "/healthz" (merge dict .Values) | default "/healthz" -}}
{{- .Files.Get "files/policies.toml" | replace "\"/healthz\"" (toJson $path) -}}
{{- end -}}
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
