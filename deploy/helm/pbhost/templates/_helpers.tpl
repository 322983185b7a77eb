{{- define "pbhost.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pbhost.labels" -}}
{{ include "pbhost.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Bytes for models: 90 % of the volume, as a pod with a fuller one than it may have is evicted. */}}
{{- define "pbhost.cacheLimit" -}}
{{- $size := .Values.models.cacheSize -}}
{{- $units := dict "" 0 "Ki" 1 "Mi" 2 "Gi" 3 "Ti" 4 -}}
{{- $bytes := regexFind "^[0-9]+" $size | int64 -}}
{{- range until (get $units (regexFind "[A-Za-z]*$" $size) | int) -}}
{{- $bytes = mul $bytes 1024 -}}
{{- end -}}
{{- div (mul $bytes 9) 10 -}}
{{- end }}
