{{- /* Which pods of this release belong together; `component` is set where each has its own. */ -}}
{{- define "controller.selector" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- end }}

{{- /* Labels of what is one for the whole release. */ -}}
{{- define "controller.labels" -}}
{{ include "controller.selector" (dict "name" "controller" "root" .) }}
{{ include "controller.origin" . }}
{{- end }}

{{- define "controller.origin" -}}
app.kubernetes.io/part-of: ai-inference
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "controller.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "controller.namespace" -}}
{{ .Values.namespace | default .Release.Namespace }}
{{- end }}

{{- /*
Name of the controller's account, ClusterRole and lease. It is the same in every installation, because
there is one in a cluster: its kinds are cluster-wide.
*/ -}}
{{- define "controller.account" -}}
ai-inference-controller
{{- end }}

{{- /* The same of the planner. */ -}}
{{- define "planner.account" -}}
ai-inference-planner
{{- end }}

{{- /* The security of every container of this chart; none needs any privilege. */ -}}
{{- define "controller.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "controller.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- /* What makes an object part of the uninstallation; those with a lower weight come first. */ -}}
{{- define "uninstall.hook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
