#!/bin/sh
# install.sh NAME VARIANT: what every image's build runs, as root, with this folder's files beside it.
#   NAME/VARIANT.lock  -> /opt/flexroll/env, hash-checked
#   /opt/flexroll/bin/flexroll, which runs the mounted tree's src/; nothing of flexroll itself is in an image
#   /etc/flexroll-image.json, which says what this image was made from
# Optional: /run/secrets/ca.crt, the CA bundle of a network that intercepts TLS; /var/cache/uv, wheels of the host.
set -eu
name=$1 variant=$2
inputs=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022
export PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
if [ -s /run/secrets/ca.crt ]; then
  export SSL_CERT_FILE=/run/secrets/ca.crt PIP_CERT=/run/secrets/ca.crt UV_SYSTEM_CERTS=1
fi

# torch.compile builds C++ on a CPU and Triton a small C module on a GPU, when jobs run: the compiler stays in. vLLM's CPU
# build loads libnuma.
if [ "$variant" != any ]; then
  packages=libnuma1
  command -v g++ > /dev/null || packages="$packages g++"
  headers=$(python3 -c 'import os, sysconfig; print(os.path.exists(sysconfig.get_path("include") + "/Python.h"))')
  [ "$headers" = True ] || packages="$packages python3-dev"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages
  apt-get clean
  rm -rf /var/lib/apt/lists/*
fi

python3 -m venv "$work/pip"
"$work/pip/bin/pip" install --quiet --no-cache-dir --no-deps --require-hashes --requirement "$inputs/uv.txt"
if [ -d /var/cache/uv ] && [ -w /var/cache/uv ]; then
  export UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy
else
  export UV_NO_CACHE=1
fi
export UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT=180
# Bytecode now: the image is read-only where it runs, and each process would compile what it imports (torch: seconds).
export UV_COMPILE_BYTECODE=1 UV_COMPILE_BYTECODE_TIMEOUT=0
"$work/pip/bin/uv" venv --quiet --python "$(command -v python3)" /opt/flexroll/env
"$work/pip/bin/uv" pip sync --quiet --python /opt/flexroll/env/bin/python --require-hashes "$inputs/$name/$variant.lock"

mkdir -p /opt/flexroll/bin
cat > /opt/flexroll/bin/flexroll << 'LAUNCHER'
#!/bin/sh
# The tree that is mounted at FLEXROLL_ROOT, on this image's packages; nothing of the caller's Python.
unset PYTHONHOME
export PYTHONNOUSERSITE=1 PYTHONPATH="${FLEXROLL_ROOT:?names the mounted tree}/src"
exec /opt/flexroll/env/bin/python -P -m flexroll "$@"
LAUNCHER
chmod 755 /opt/flexroll/bin/flexroll

cd "$inputs"
/opt/flexroll/env/bin/python - "$name" "$variant" > "$work/image.json" << 'DESCRIBE'
import hashlib, json, sys

name, variant = sys.argv[1:]
files = (f"{name}/{variant}.lock", f"{name}/Containerfile", "install.sh")
print(json.dumps({"stack": name, "variant": variant,
                  "inputs": {f: hashlib.sha256(open(f, "rb").read()).hexdigest() for f in files}}, indent=1))
DESCRIBE
install -m 644 "$work/image.json" /etc/flexroll-image.json
