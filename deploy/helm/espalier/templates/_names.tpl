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

{{/* Whether an object for the Prometheus operator is made. Takes a list: the root, and auto, true or false. */}}
{{- define "espalier.watched" -}}
{{- $root := index . 0 }}{{ $value := index . 1 | toString -}}
{{- if or (eq $value "true") (and (eq $value "auto") ($root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) }}yes{{ end }}
{{- end }}

{{/* The values of the part that customers call. */}}
{{- define "espalier.front" -}}
{{ gt (int .Values.shards.count) 0 | ternary "router" "single" }}
{{- end }}

{{/* Everything that has to do with two values at once. */}}
{{- define "espalier.check" -}}
{{- $sharded := gt (int .Values.shards.count) 0 }}
{{- if and $sharded (not (or .Values.models.store .Values.models.existingClaim)) }}
{{- fail "shards need models.store or models.existingClaim" }}
{{- end }}
{{- with .Values.networkPolicy }}
{{- if and .enabled (not (or .prometheusNamespace .prometheus)) (include "espalier.watched" (list $ $.Values.monitoring.podMonitor)) }}
{{- fail "the NetworkPolicy would keep Prometheus out: set networkPolicy.prometheusNamespace, or monitoring.podMonitor=false" }}
{{- end }}
{{- if and $.Values.ingress.enabled .enabled (not .clients) }}
{{- fail "ingress.enabled needs networkPolicy.clients: the pods of the ingress controller" }}
{{- end }}
{{- end }}
{{- $backup := or (index .Values.settings "ESPALIER_BACKUP") (index .Values.single.settings "ESPALIER_BACKUP") }}
{{- if and (not $sharded) $backup (or (gt (int .Values.single.replicas) 1) .Values.single.autoscaling.enabled) }}
{{- fail "ESPALIER_BACKUP is for one pod: single.replicas=1, without single.autoscaling" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.enabled needs ingress.host" }}
{{- end }}
{{- if and .Values.live.enabled (not $sharded) }}
{{- if or .Values.models.store (not .Values.models.existingClaim) }}
{{- fail "live.enabled without shards needs models.existingClaim, and no store: the journal lies beside the models" }}
{{- end }}
{{- if or (ne (int .Values.single.replicas) 1) .Values.single.autoscaling.enabled }}
{{- fail "live.enabled without shards needs single.replicas=1: a journal has one writer" }}
{{- end }}
{{- if not (or .Values.keys.existingSecret .Values.keys.write) }}
{{- fail "live.enabled needs keys.write, or keys.existingSecret" }}
{{- end }}
{{- end }}
{{- if and .Values.live.enabled $sharded }}
{{- if not .Values.models.store }}
{{- fail "live.enabled needs models.store: the journal is written beside the models, and a claim is mounted read-only" }}
{{- end }}
{{- with .Values.keys }}
{{- if not (or .existingSecret (and .write .admin .follow)) }}
{{- fail "live.enabled needs keys.write, keys.admin and keys.follow, or keys.existingSecret" }}
{{- end }}
{{- end }}
{{- end }}
{{- range $part := $sharded | ternary (list "shards" "router") (list "single") }}
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

{{/* How pods are reached. */}}
{{- define "espalier.scheme" -}}
{{ empty .Values.tls.secret | ternary "http" "https" }}
{{- end }}
