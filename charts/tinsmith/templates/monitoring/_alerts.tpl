{{/* The alerts of files/alerts.yaml with the labels of this release's series and the URL of each runbook. */}}
{{- define "tinsmith.alertGroups" -}}
{{- $ours := printf "namespace=%q" .Release.Namespace }}
{{- $names := (include "tinsmith.namespaces" . | fromJson).names }}
{{- $volumes := $names | empty | not | ternary (printf "namespace=~%q" (append $names .Release.Namespace | uniq | join "|")) "namespace!=\"\"" }}
{{- $claims := printf ".*-journal|%s|%s" (include "tinsmith.dataClaim" .) (include "tinsmith.checkpointClaim" .) }}
{{- $text := .Files.Get "files/alerts.yaml"
    | replace "%operator%" (printf "%s,job=%q" $ours (include "tinsmith.operator" .))
    | replace "%api_server%" (printf "%s,job=%q" $ours (include "tinsmith.apiServer" .))
    | replace "%volumes%" $volumes
    | replace "%claims%" $claims }}
{{- $groups := (fromYaml $text).groups }}
{{- $page := .Values.monitoring.prometheusRule.runbookUrl | default "docs/how-to/runbooks.md" }}
{{- range $group := $groups }}
{{- range $group.rules }}
{{- $_ := set .annotations "runbook_url" (printf "%s#%s" $page (lower .alert)) }}
{{- end }}
{{- end }}
{{- toYaml $groups }}
{{- end }}
