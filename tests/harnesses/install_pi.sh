#!/usr/bin/env bash
# The Pi agent and the Node.js it needs, from npm into the checkout's cache. Runs once a version.
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)/.cache/pi"
node=22.23.3 pi=1.6.0
stamp="$root/.installed-$node-$pi"
[[ -e $stamp ]] && exit 0
rm -rf "$root"
mkdir -p "$root"
npm install --silent --no-audit --no-fund --prefix "$root" "node@$node"
PATH="$root/node_modules/.bin:$PATH" npm install --silent --no-audit --no-fund --prefix "$root" \
  "@earendil-works/pi-coding-agent@$pi"
touch "$stamp"
