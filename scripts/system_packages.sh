#!/usr/bin/env bash
# Installs what pip cannot bring: a C++20 compiler, OpenSSL's headers (libcrypto, libssl), the doctest
# header, and ip/tc for the tests and the demo in network namespaces.
set -euo pipefail

missing=()
command -v g++ >/dev/null || missing+=(g++)
[ -e /usr/include/openssl/hmac.h ] || missing+=(libssl-dev)
[ -e /usr/include/doctest/doctest.h ] || missing+=(doctest-dev)
command -v ip >/dev/null && command -v tc >/dev/null || missing+=(iproute2)
python3 -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv python3-dev)
[ ${#missing[@]} -eq 0 ] && exit 0

if command -v apt-get >/dev/null && [ "$(id -u)" -eq 0 ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}"
else
  echo "qcoll needs these packages (Debian names): ${missing[*]}" >&2
  echo "Install them, for example: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
