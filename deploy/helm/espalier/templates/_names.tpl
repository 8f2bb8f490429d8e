{{/* Names, labels, and what of the values cannot be checked by their schema. */}}

{{- define "espalier.name" -}}
{{ .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* 40 characters at most: the longest suffix is that of a pod, and its host name may have 63. */}}
{{- define "espalier.fullname" -}}
{{- $name := include "espalier.name" . -}}
{{- $full := .Values.fullnameOverride | default (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) -}}
{{ $full | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "espalier.selector" -}}
app.kubernetes.io/name: {{ include "espalier.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "espalier.labels" -}}
{{ include "espalier.selector" . }}
app.kubernetes.io/part-of: espalier
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "espalier.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "espalier.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "espalier.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- define "espalier.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" (include "espalier.fullname" .)) }}
{{- end }}

{{- define "espalier.ownKeys" -}}
{{- with .Values.keys }}{{ if and (not .existingSecret) (or .retrieve .write .admin .internal .follow) }}yes{{ end }}{{ end }}
{{- end }}

{{/* Everything that has to do with two values at once. */}}
{{- define "espalier.check" -}}
{{- if not (or .Values.models.store .Values.models.existingClaim) }}
{{- fail "set models.store or models.existingClaim" }}
{{- end }}
{{- if .Values.live.enabled }}
{{- if not .Values.models.store }}
{{- fail "live.enabled needs models.store: the journal is written beside the models, and a claim is mounted read-only" }}
{{- end }}
{{- with .Values.keys }}
{{- if not (or .existingSecret (and .write .admin .follow)) }}
{{- fail "live.enabled needs keys.write, keys.admin and keys.follow, or keys.existingSecret" }}
{{- end }}
{{- end }}
{{- end }}
{{- range $part := list "shards" "router" }}
{{- with index $.Values $part "autoscaling" }}
{{- if .enabled }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "%s.autoscaling: minReplicas %v is more than maxReplicas %v" $part .minReplicas .maxReplicas) }}
{{- end }}
{{- if not (or .engineBusy .queueDepth .cpu) }}
{{- fail (printf "%s.autoscaling: set at least one of engineBusy, queueDepth and cpu" $part) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
