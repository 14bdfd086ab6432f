#!/usr/bin/env bash
# A Docker engine that answers, and the image that tests run, made by debootstrap: nothing is made twice. Debian or Ubuntu, root or sudo.
set -euo pipefail
cd "$(dirname "$0")/../.."

cache=$PWD/.cache/docker
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
mkdir -p "$cache"

install() {
  $sudo apt-get update -qq
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

wait_for_engine() {
  for _ in $(seq 60); do
    if answers; then return 0; fi
    sleep 0.5
  done
  return 1
}

start() {
  $sudo nohup dockerd "$@" >"$cache/dockerd.log" 2>&1 &
  wait_for_engine
}

command -v docker >/dev/null && command -v dockerd >/dev/null || answers || install docker.io iptables
if ! answers; then
  # In a container or a small machine the best storage driver, or the packet filter, may be denied.
  start || start --storage-driver=vfs || start --storage-driver=vfs --iptables=false --bridge=none || {
    tail -n 20 "$cache/dockerd.log" >&2
    echo "no Docker engine can be started on this machine: the tests of containers cannot run here" >&2
    exit 1
  }
fi

if ! docker image inspect polar-test-base:latest >/dev/null 2>&1; then
  command -v debootstrap >/dev/null || install debootstrap
  $sudo rm -rf "$cache/root"
  $sudo debootstrap --variant=minbase --include=python3,git,ca-certificates,patch,procps stable "$cache/root" \
    >"$cache/debootstrap.log"
  $sudo tar -C "$cache/root" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' --exclude='./dev/*' -c . |
    docker import - polar-test-base:latest
  $sudo rm -rf "$cache/root"
fi
docker version --format 'Docker engine {{.Server.Version}}'
