{{/* The catalogue in the API server's format. */}}
{{- define "tinsmith.catalogue" -}}
{{- $entries := list }}
{{- range .Values.models }}
{{- $entries = append $entries (dict "name" .name "maxSessions" (.maxSessions | default 1) "spec" .spec) }}
{{- end }}
{{- toJson $entries }}
{{- end }}
