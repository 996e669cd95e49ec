{{/*
The Envoy of a pod: a sidecar, which is asked to end only after the picker has, and the picker ends with its last response.
Told to drain when the pod's end begins, it goes on, and asks clients on connections that live on to make new ones.
*/}}
{{- define "pilotfish.envoyContainer" -}}
- name: envoy
  image: "{{ .Values.envoy.image.repository }}:{{ .Values.envoy.image.tag }}"
  imagePullPolicy: {{ .Values.envoy.image.pullPolicy }}
  restartPolicy: Always
  command:
    - envoy
    - -c
    - /etc/envoy/envoy.yaml
    - --concurrency
    - {{ .Values.envoy.concurrency | quote }}
    - --disable-hot-restart
    - --drain-strategy
    - immediate
    # An attempt that finds no host is no news.
    - --component-log-level
    - upstream:error
  ports:
    - {name: http, containerPort: {{ .Values.envoy.port }}}
  readinessProbe:
    tcpSocket: {port: {{ .Values.envoy.port }}}
    periodSeconds: 2
    failureThreshold: 1
  lifecycle:
    preStop:
      exec:
        command:
          - bash
          - -c
          - >-
            exec 3<>/dev/tcp/127.0.0.1/9901 &&
            printf 'POST /drain_listeners?graceful&skip_exit HTTP/1.1\r\nhost: admin\r\nconnection: close\r\ncontent-length: 0\r\n\r\n' >&3 &&
            read -r answer <&3 && [[ $answer == *200* ]]
  securityContext:
    {{- include "pilotfish.containerSecurity" . | nindent 4 }}
  resources:
    {{- toYaml .Values.envoy.resources | nindent 4 }}
  volumeMounts:
    - {name: envoy, mountPath: /etc/envoy, readOnly: true}
{{- end }}
