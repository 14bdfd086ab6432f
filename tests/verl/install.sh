#!/usr/bin/env bash
# verl for the CPU in an environment of its own: install.sh DIRECTORY. No inference engine, no CUDA.
set -euo pipefail
cd "$(dirname "$0")/../.."
target=$1
[ -x "$target/bin/python" ] || "${PYTHON:-python3}" -m venv "$target"
pip=("$target/bin/pip" install --quiet)
"${pip[@]}" "${TORCH:-torch}"
# Without their dependencies: these name loggers and dashboards that nothing here imports.
"${pip[@]}" --no-deps 'verl>=0.9,<0.10' 'TransferQueue>=0.1.10,<0.2'
"${pip[@]}" 'tensordict==0.10.0' 'ray>=2.41' 'numpy>=2' 'transformers>=5.5.3,<5.11,!=5.6.0' hydra-core codetiming \
  datasets cachetools pillow uvicorn fastapi pyzmq msgspec torchdata aiohttp peft psutil pandas
# The library with its entry point; its own dependencies, and what its tests need.
"${pip[@]}" --editable '.[engine]' 'pytest>=8' 'pytest-timeout>=2.3'
