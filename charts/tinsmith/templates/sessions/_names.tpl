{{/* The names of the installation's own objects, as JSON. Operator and policy refuse them in sessions and pools. The list also
     has the names of Secrets and claims that an earlier revision of the release may have created. */}}
{{- define "tinsmith.installationNames" -}}
{{- $secrets := list
      (include "tinsmith.caSecret" .)
      (include "tinsmith.apiServerTlsSecret" .)
      (include "tinsmith.keySecret" . | trim)
      (printf "%s-api-key" .Release.Name)
      (printf "%s-given-key" .Release.Name)
      .Values.apiServer.database.existingSecret.name
      .Values.apiServer.ingress.tls.secretName
      .Values.checkpoints.remote.secretName }}
{{- $claims := list
      (include "tinsmith.dataClaim" . | trim)
      (include "tinsmith.checkpointClaim" . | trim)
      (printf "%s-api-server-data" .Release.Name)
      (printf "%s-checkpoints" .Release.Name) }}
{{- dict
      "secrets" ($secrets | compact | uniq | sortAlpha)
      "pullSecrets" (.Values.image.pullSecrets | uniq | sortAlpha)
      "claims" ($claims | uniq | sortAlpha)
      "accounts" (list (include "tinsmith.apiServer" .) (include "tinsmith.operator" .)) | toJson }}
{{- end }}

{{/* The regular expression of a pattern with `*`, as JSON: (dict "pattern" "registry/*" "ending" ""). */}}
{{- define "tinsmith.patternExpression" -}}
{{- printf "^%s%s$" (regexQuoteMeta .pattern | replace "\\*" ".*") .ending | toJson }}
{{- end }}

{{/* A CEL expression that is true if `name` matches one of the patterns: (dict "patterns" LIST "ending" ""). */}}
{{- define "tinsmith.matchesOne" -}}
{{- $ending := .ending }}
{{- $tests := list }}
{{- range .patterns }}
{{- $tests = append $tests (printf "name.matches(%s)" (include "tinsmith.patternExpression" (dict "pattern" . "ending" $ending))) }}
{{- end }}
{{- join " || " $tests | default "false" }}
{{- end }}

{{/* The repository of the workers' image. Sessions may always use its images. */}}
{{- define "tinsmith.workerRepository" -}}
{{ .Values.image.registry }}/{{ .Values.worker.image.repository }}
{{- end }}
