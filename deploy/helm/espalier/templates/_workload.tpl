{{/*
A StatefulSet or a Deployment of service pods. Takes a list: the root, the name, the component, the values of the part (single, shards or
router), and a dict of what differs: kind, service (its name), settings (ConfigMap), command, keys (entries of the Secret), environment,
volumes, mounts, labels, replicas (none: an autoscaler has them), journal (its volume is kept, and written).
*/}}
{{- define "espalier.workload" -}}
{{- $root := index . 0 }}{{ $name := index . 1 }}{{ $component := index . 2 }}{{ $part := index . 3 }}{{ $own := index . 4 }}
{{- $v := $root.Values }}
apiVersion: apps/v1
kind: {{ $own.kind }}
metadata:
  name: {{ $name }}
  labels:
    {{- include "espalier.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $component }}
spec:
  {{- if eq $own.kind "StatefulSet" }}
  serviceName: {{ $own.service }}
  podManagementPolicy: Parallel # a first start waits for nobody; updates go one pod at a time all the same
  {{- else }}
  strategy:
    {{- if $own.journal }}
    type: Recreate # a journal has one writer
    {{- else }}
    rollingUpdate: { maxUnavailable: 0 }
    {{- end }}
  {{- end }}
  {{- if not (kindIs "invalid" $own.replicas) }}
  replicas: {{ $own.replicas }}
  {{- end }}
  minReadySeconds: 5
  selector:
    matchLabels:
      {{- include "espalier.selector" $root | nindent 6 }}
      {{- toYaml $own.labels | nindent 6 }}
  {{- if and $v.models.store (eq $own.kind "StatefulSet") }}
  {{- if not $own.journal }}
  persistentVolumeClaimRetentionPolicy: { whenDeleted: Delete, whenScaled: Delete } # they are copies of what the store has
  {{- end }}
  volumeClaimTemplates:
    - metadata:
        name: models
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $v.models.storageClass }}
        storageClassName: {{ quote . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $part.volumeSize }}
  {{- end }}
  template:
    metadata:
      labels: # without the chart's version: a new chart alone restarts nothing
        {{- include "espalier.selector" $root | nindent 8 }}
        {{- toYaml $own.labels | nindent 8 }}
        {{- with $part.podLabels }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      annotations:
        espalier.settings/sha256: {{ include (print $root.Template.BasePath "/settings.yaml") $root | sha256sum }}
        espalier.keys/sha256: {{ toJson $v.keys | sha256sum }}
        {{- with $part.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "espalier.serviceAccount" $root | quote }}
      automountServiceAccountToken: false
      enableServiceLinks: false # a Service named espalier would set variables like ESPALIER_PORT
      terminationGracePeriodSeconds: {{ add $v.drain.delaySeconds $v.drain.finishSeconds 30 }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        runAsGroup: 10001
        fsGroup: 10001
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile: { type: RuntimeDefault }
      {{- with $v.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $part.priorityClassName }}
      priorityClassName: {{ quote . }}
      {{- end }}
      {{- with $part.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $part.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $part.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      topologySpreadConstraints:
        {{- with $part.topologySpreadConstraints }}
        {{- toYaml . | nindent 8 }}
        {{- else }}
        {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
        - maxSkew: 1
          topologyKey: {{ . }}
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels:
              {{- include "espalier.selector" $root | nindent 14 }}
              {{- toYaml $own.labels | nindent 14 }}
        {{- end }}
        {{- end }}
      containers:
        - name: {{ $component }}
          image: {{ include "espalier.image" $root }}
          imagePullPolicy: {{ $v.image.pullPolicy }}
          {{- with $own.command }}
          command: {{ toJson . }}
          {{- end }}
          envFrom:
            - configMapRef:
                name: {{ $own.settings }}
            {{- if and $v.models.store $v.models.storeSecret }}
            - secretRef:
                name: {{ quote $v.models.storeSecret }}
            {{- end }}
          env:
            {{- range $variable, $value := $own.environment }}
            - name: {{ $variable }}
              value: {{ $value | quote }}
            {{- end }}
            {{- range $own.keys }}
            - name: {{ . }}
              valueFrom:
                secretKeyRef:
                  name: {{ include "espalier.keysSecret" $root }}
                  key: {{ . }}
                  optional: true
            {{- end }}
          ports:
            - name: http
              containerPort: 8000
          # /readyz waits for a store and for other pods, so it decides on traffic alone: a restart would not bring them sooner.
          startupProbe:
            httpGet: { path: /livez, port: http{{ if $v.tls.secret }}, scheme: HTTPS{{ end }} }
            periodSeconds: 2
            failureThreshold: 60
          livenessProbe:
            httpGet: { path: /livez, port: http{{ if $v.tls.secret }}, scheme: HTTPS{{ end }} }
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          readinessProbe:
            httpGet: { path: /readyz, port: http{{ if $v.tls.secret }}, scheme: HTTPS{{ end }} }
            periodSeconds: 5
            timeoutSeconds: 4
            failureThreshold: 2
          resources:
            {{- toYaml $part.resources | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities: { drop: [ALL] }
            readOnlyRootFilesystem: true
          volumeMounts:
            - { name: tmp, mountPath: /tmp }
            {{- if or $v.models.store $v.models.existingClaim }}
            - { name: models, mountPath: /models{{ if not (or $v.models.store $own.journal) }}, readOnly: true{{ end }} }
            {{- end }}
            {{- if $v.tls.secret }}
            - { name: tls, mountPath: /etc/espalier-tls, readOnly: true }
            {{- end }}
            {{- with $own.mounts }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
      volumes:
        - name: tmp # the workers' counters; it counts towards the memory limit
          emptyDir: { medium: Memory, sizeLimit: 256Mi }
        {{- if and $v.models.store (eq $own.kind "Deployment") }}
        - name: models # a copy of what the store has; it goes with the pod
          ephemeral:
            volumeClaimTemplate:
              spec:
                accessModes: [ReadWriteOnce]
                {{- with $v.models.storageClass }}
                storageClassName: {{ quote . }}
                {{- end }}
                resources:
                  requests:
                    storage: {{ $part.volumeSize }}
        {{- else if and $v.models.existingClaim (not $v.models.store) }}
        - name: models
          persistentVolumeClaim: { claimName: {{ quote $v.models.existingClaim }}{{ if not $own.journal }}, readOnly: true{{ end }} }
        {{- end }}
        {{- with $v.tls.secret }}
        - name: tls
          secret: { secretName: {{ quote . }} }
        {{- end }}
        {{- with $own.volumes }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
{{- end }}
