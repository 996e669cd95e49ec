{{- define "pilotfish.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Names end in up to 8 more characters, in a label of 63. */}}
{{- define "pilotfish.fullname" -}}
{{- $name := include "pilotfish.name" . }}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $both .Values.fullnameOverride | trunc 54 | trimSuffix "-" }}
{{- end }}

{{- define "pilotfish.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pilotfish.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pilotfish.labels" -}}
{{ include "pilotfish.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Metadata of an object, from (dict "root" $ "suffix" "" "labels" {} "annotations" {}). */}}
{{- define "pilotfish.metadata" -}}
name: {{ include "pilotfish.fullname" .root }}{{ .suffix }}
namespace: {{ .namespace | default .root.Release.Namespace }}
labels:
  {{- include "pilotfish.labels" .root | nindent 2 }}
  {{- with .labels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "pilotfish.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "pilotfish.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "pilotfish.pool" -}}
{{- .Values.inferencePool.name | default (include "pilotfish.fullname" .) }}
{{- end }}

{{/* Not empty where an Envoy stands beside each picker. */}}
{{- define "pilotfish.withEnvoy" -}}
{{- if ne .Values.mode "inferencepool" }}yes{{ end }}
{{- end }}

{{/* Not empty where there is a scheduler configuration: the name of its ConfigMap. */}}
{{- define "pilotfish.schedulerConfigMap" -}}
{{- if .Values.scheduler.config }}{{ include "pilotfish.fullname" . }}
{{- else }}{{ .Values.scheduler.configMap.name }}{{ end }}
{{- end }}

{{/* What every container may do. */}}
{{- define "pilotfish.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "pilotfish.args" -}}
- serve
{{- if eq .Values.mode "inferencepool" }}
- --pool-name={{ include "pilotfish.pool" . }}
- --pool-namespace={{ .Release.Namespace }}
- --secure-serving={{ .Values.tls.enabled }}
{{- if .Values.tls.enabled }}
- --tls-min-version={{ .Values.tls.minVersion }}
{{- if .Values.tls.secretName }}
- --cert-path=/etc/pilotfish/tls
{{- end }}
{{- if .Values.tls.clientCA.secretName }}
- --client-ca-file=/etc/pilotfish/client-ca/ca.crt
{{- end }}
{{- end }}
{{- with .Values.trustedClients }}
- --trusted-clients={{ join "," . }}
{{- end }}
{{- else }}
- --secure-serving=false
{{- end }}
{{- if eq .Values.mode "standalone-envoy" }}
{{- $labels := list }}
{{- range $label, $value := .Values.endpoints.selector }}{{ $labels = append $labels (printf "%s=%s" $label $value) }}{{ end }}
- --endpoint-selector={{ join "," $labels }}
- --endpoint-target-ports={{ join "," .Values.endpoints.targetPorts }}
- --pool-namespace={{ .Release.Namespace }}
{{- end }}
{{- if eq .Values.mode "kthena" }}
{{- with .Values.namespaces }}
- --namespaces={{ join "," . }}
{{- end }}
{{- with .Values.defaultPool }}
- --default-pool={{ . }}
{{- end }}
{{- end }}
{{- if include "pilotfish.schedulerConfigMap" . }}
- --config=/etc/pilotfish/scheduler/config.yaml
{{- end }}
{{- if .Values.sessionKey.secretName }}
- --session-key-file=/etc/pilotfish/session/key
{{- end }}
{{- if .Values.tokenizers.volume }}
- --tokenizer-dir=/etc/pilotfish/tokenizers
{{- end }}
- --max-body-bytes={{ .Values.bodies.maxBytes | int64 }}
- --max-buffered-bytes={{ .Values.bodies.maxBufferedBytes | int64 }}
- --drain-grace={{ .Values.drain.graceSeconds }}s
- --drain-timeout={{ .Values.drain.timeoutSeconds }}s
- --log-format={{ .Values.log.format }}
{{- with .Values.log.level }}
- --log-level={{ . }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* Files of the picker, one line each: folder, kind of volume, object, key, name of the file. */}}
{{- define "pilotfish.files" -}}
{{- with include "pilotfish.schedulerConfigMap" . }}
{{- $key := ternary "config.yaml" $.Values.scheduler.configMap.key (not (empty $.Values.scheduler.config)) }}
- {folder: scheduler, source: {configMap: {name: {{ . }}, items: [{key: {{ $key }}, path: config.yaml}]}}}
{{- end }}
{{- with .Values.sessionKey }}{{ if .secretName }}
- {folder: session, source: {secret: {secretName: {{ .secretName }}, items: [{key: {{ .secretKey }}, path: key}]}}}
{{- end }}{{ end }}
{{- if and (eq .Values.mode "inferencepool") .Values.tls.enabled }}
{{- with .Values.tls.secretName }}
- {folder: tls, source: {secret: {secretName: {{ . }}}}}
{{- end }}
{{- with .Values.tls.clientCA }}{{ if .secretName }}
- {folder: client-ca, source: {secret: {secretName: {{ .secretName }}, items: [{key: {{ .key }}, path: ca.crt}]}}}
{{- end }}{{ end }}
{{- end }}
{{- with .Values.tokenizers.volume }}
- {folder: tokenizers, source: {{ toJson . }}}
{{- end }}
{{- end }}

{{/* The shipped configuration with the deployment's own addresses, times and sizes. */}}
{{- define "pilotfish.envoy" -}}
{{- $envoy := .Values.envoy }}
{{- $text := .Files.Get "files/envoy/full-duplex.yaml" }}
{{- $changes := list
  (list "{address: 127.0.0.1, port_value: 10000}" (printf "{address: %q, port_value: %d}" $envoy.listenAddress (int64 $envoy.port)))
  (list "stream_idle_timeout: 600s" (printf "stream_idle_timeout: %s" $envoy.streamIdleTimeout))
  (list "request_timeout: 120s" (printf "request_timeout: %s" $envoy.requestTimeout))
  (list "request_body_buffer_limit: 67108864" (printf "request_body_buffer_limit: %d" (int64 .Values.bodies.maxBytes)))
}}
{{- range $changes }}
{{- if not (contains (first .) $text) }}{{ fail (printf "files/envoy/full-duplex.yaml does not say `%s`" (first .)) }}{{ end }}
{{- $text = replace (first .) (last .) $text }}
{{- end }}
{{- $envoy.config | default $text }}
{{- end }}

{{/* What the picker may do, by mode. */}}
{{- define "pilotfish.rules" -}}
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
{{- if eq .Values.mode "inferencepool" }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  resourceNames: [{{ include "pilotfish.pool" . }}]
  verbs: [get, list, watch]
{{- else if eq .Values.mode "kthena" }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch]
- apiGroups: [networking.serving.volcano.sh]
  resources: [modelroutes, modelservers]
  verbs: [get, list, watch]
- apiGroups: [networking.serving.volcano.sh]
  resources: [modelroutes/status, modelservers/status]
  verbs: [patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
- apiGroups: [llm-d.ai, inference.networking.x-k8s.io]
  resources: [inferenceobjectives, inferencemodelrewrites]
  verbs: [get, list, watch]
{{- end }}
