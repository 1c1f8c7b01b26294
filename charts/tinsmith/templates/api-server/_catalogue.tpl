{{/* The models that the API server may make sessions of, as it reads them. */}}
{{- define "tinsmith.catalogue" -}}
{{- $entries := list }}
{{- range .Values.models }}
{{- $entries = append $entries (dict "name" .name "maxSessions" (.maxSessions | default 1) "spec" .spec) }}
{{- end }}
{{- toJson $entries }}
{{- end }}
