#!/usr/bin/env bash
# Install the chart with the sample in a new kind cluster, send one request, and delete the cluster.
# Needs docker, kind, kubectl and helm, and the image: docker build --target service-cpu -t espalier-service-cpu:0.1.0 .
# KEEP=1 leaves the cluster; further arguments go to `helm install`, as --set single.replicas=1.
set -euo pipefail
cd "$(dirname "$0")/../.."
image=${IMAGE:-espalier-service-cpu:0.1.0}
cluster=espalier-try

for program in docker kind kubectl helm; do
  command -v "$program" >/dev/null || { echo "$program is missing" >&2; exit 2; }
done
docker image inspect "$image" >/dev/null || { echo "$image is missing: docker build --target service-cpu -t $image ." >&2; exit 2; }

kind create cluster --name "$cluster" --wait 120s
finish() {
  status=$?
  [ "$status" = 0 ] || kubectl --context "kind-$cluster" get pods,events -o wide || true
  [ -n "${KEEP:-}" ] || kind delete cluster --name "$cluster"
  exit "$status"
}
trap finish EXIT
kind load docker-image "$image" --name "$cluster"
helm --kube-context "kind-$cluster" install try deploy/helm/espalier --wait --timeout 10m \
  --set "image.repository=${image%:*}" --set "image.tag=${image##*:}" --set image.pullPolicy=Never "$@"

kubectl --context "kind-$cluster" port-forward svc/try-espalier 18000:80 >/dev/null &
forward=$!
for _ in $(seq 30); do
  curl -sf localhost:18000/readyz >/dev/null && break
  sleep 1
done
answer=$(curl -sf localhost:18000/retrieve -H 'Content-Type: application/json' \
  -d '{"model": "debian-depends", "queries": [{"history": ["libsdl2-2.0-0", "libgl1"]}], "m": 5}')
kill "$forward"
echo "$answer"
case "$answer" in *'"items":[{'*) echo "The chart works: five items came back." ;; *) echo "No items came back." >&2; exit 1 ;; esac
