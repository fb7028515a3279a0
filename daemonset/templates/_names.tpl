{{/* Everything that belongs to one release has this name. */}}
{{- define "node-plugin.name" -}}
ai-inference-node-plugin
{{- end }}

{{- define "node-plugin.namespace" -}}
{{ .Values.namespace | default .Release.Namespace }}
{{- end }}

{{- define "node-plugin.selector" -}}
app.kubernetes.io/name: {{ include "node-plugin.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "node-plugin.labels" -}}
{{ include "node-plugin.selector" . }}
app.kubernetes.io/component: node-plugin
app.kubernetes.io/part-of: ai-inference
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The driver root as the container sees it: the host's own root cannot be mounted
     over the container's. */}}
{{- define "node-plugin.driverRoot" -}}
{{- if eq .Values.driverRoot "/" }}/host{{ else }}{{ .Values.driverRoot }}{{ end }}
{{- end }}

{{/* Whether MPS daemons may be started: a text that counts as true, or none. */}}
{{- define "node-plugin.mps" -}}
{{- if has .Values.sharing.mode (list "auto" "mps") }}yes{{ end }}
{{- end }}
