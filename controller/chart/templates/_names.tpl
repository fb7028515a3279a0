{{- define "controller.selector" -}}
app.kubernetes.io/name: controller
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "controller.labels" -}}
{{ include "controller.selector" . }}
app.kubernetes.io/part-of: ai-inference
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "controller.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Cluster-wide objects carry the release's namespace, so that two installations can be told apart. */ -}}
{{- define "controller.account" -}}
ai-inference-controller
{{- end }}
