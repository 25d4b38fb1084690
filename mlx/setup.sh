#!/usr/bin/env bash
# Prepares MLX for this repository, so that `cargo build` and `cargo test` work.
#
#   mlx/setup.sh                  Linux: MLX on the CPU, and the Python environments of the interop tests
#   mlx/setup.sh --backend cuda   Linux: MLX for NVIDIA GPUs (CUDA 13); a plain run switches back, and both stay installed
#   mlx/setup.sh --no-python      leaves the Python environments out
#   mlx/setup.sh --python         macOS: makes the Python environments too (Linux: the default)
#   mlx/setup.sh --into FOLDER    prepares an application's own workspace, so that it builds with this crate as a dependency; the
#                                 runtime stays here, so run it again after moving either folder. Without Python environments
#
# On macOS Cargo itself compiles MLX, so the script only checks the tools for it. On Linux mlx-sys has no build of its own:
# the script takes MLX from PyPI, builds mlx-c from the sources inside the mlx-sys package, and writes .cargo/config.toml,
# which puts the result in the place of mlx-sys's build script. Everything lands in mlx/.runtime and .cargo, both ignored by
# git. A second run finds its stamps and does nothing; an interrupted run is taken up at the step it had reached.
set -Eeuo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
repo=$(dirname "$here")
runtime=$here/.runtime
workspace=$repo
config_mark="# Written by mlx/setup.sh; run it again to renew this file."
# shellcheck source=mlx/VERSIONS
source "$here/VERSIONS"

step="reading the arguments"
hint="see the first lines of mlx/setup.sh"

say() { printf '%s\n' "$*"; }

fail() {
  printf 'mlx/setup.sh: %s\n' "$1" >&2
  trap - ERR
  exit 1
}

failed() {
  # A command substitution fails again in the shell around it, which reports it.
  ((BASH_SUBSHELL)) && exit 1
  fail "failed while $step.
  $hint"
}
trap failed ERR

# begin NAME HINT: names the step that a failure is reported with, and what may help then.
begin() {
  step=$1 hint=$2
  say "mlx: $step"
}

check_macos() {
  step="checking the tools" hint=""
  xcode-select -p >/dev/null 2>&1 || fail "no Xcode command line tools. Get them with: xcode-select --install"
  # Xcode 26 has the command without the compiler behind it, so the command is also run.
  if ! xcrun -f metal >/dev/null 2>&1 || ! xcrun metal --version >/dev/null 2>&1; then
    fail "no Metal compiler.
  Install Xcode, then: sudo xcode-select -s /Applications/Xcode.app && xcodebuild -downloadComponent MetalToolchain"
  fi
  command -v cmake >/dev/null || fail "no cmake. Get it with: brew install cmake"
  command -v cargo >/dev/null || fail "no cargo. Get Rust from https://rustup.rs"
  say "mlx: Xcode, the Metal compiler and cmake are here; nothing else is needed. The first cargo build compiles MLX (minutes)."
}

check_linux() {
  step="checking the tools" hint=""
  command -v cargo >/dev/null || fail "no cargo. Get Rust from https://rustup.rs"
  command -v "$cxx" >/dev/null || fail "no C++ compiler ($cxx). On Debian or Ubuntu: apt-get install g++"
  check_python
  [[ ! -f $config || $(head -n 1 "$config") == "$config_mark" ]] ||
    fail "$config exists and is not the work of this script. Move its content elsewhere (for example to ~/.cargo/config.toml)."
}

check_python() {
  python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "no python3 of version 3.11 or later that can make virtual environments. On Debian or Ubuntu: apt-get install python3-venv"
}

# make_venv NAME PACKAGE...: an environment with these packages, made anew unless its stamp says that all of them are in.
make_venv() {
  local venv=$runtime/$1
  shift
  # An environment holds absolute paths and needs the interpreter that made it.
  local key
  key="$repo $(command -v python3) $*"
  [[ -f $venv/stamp && $(<"$venv/stamp") == "$key" ]] && return
  begin "installing $* in ${venv#"$repo/"}" "pip must reach PyPI; its message is above."
  rm -rf "$venv"
  python3 -m venv "$venv"
  # Python compiles what a test imports; compiling all of it here would take most of the time.
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-input --no-compile "$@"
  printf '%s\n' "$key" >"$venv/stamp"
}

make_test_venvs() {
  local mlx=mlx
  [[ $system == Linux ]] && mlx="mlx[cpu]"
  make_venv venv-0.31 "mlx-lm==$MLX_LM_OLD" "$mlx==$MLX_FOR_LM_OLD" "transformers==$TRANSFORMERS" "numpy==$NUMPY"
  make_venv venv-0.32 "mlx-lm==$MLX_LM_NEW" "$mlx==$MLX_FOR_LM_NEW" "transformers==$TRANSFORMERS" "numpy==$NUMPY"
}

# Prints the folder of mlx-sys in Cargo's registry, after Cargo has fetched it.
find_mlx_sys() {
  cargo metadata --format-version 1 --all-features --filter-platform "$triple" --manifest-path "$repo/Cargo.toml" |
    python3 -c '
import json, os, sys
want = dict(zip(("mlx-sys", "mlx-rs"), sys.argv[1:]))
found = {p["name"]: p for p in json.load(sys.stdin)["packages"] if p["name"] in want}
for name, version in want.items():
    if name not in found or found[name]["version"] != version:
        sys.exit(f"Cargo.toml does not have {name} {version}, which mlx/VERSIONS pins.")
print(os.path.dirname(found["mlx-sys"]["manifest_path"]))
' "$MLX_SYS" "$MLX_RS"
}

# Makes mlx-c, the glue and the bindings, and sets `native` to their folder. Its name holds the hash of all that went in:
# Cargo builds mlx-sys again only when the name changes, not when the files do.
build_native() {
  local key mlx_sys tools=$runtime/mlx-$backend build=$runtime/build new=$runtime/native.new
  key=$({ "$cxx" --version && cat "$here/VERSIONS" "$here"/native/*.* "$here"/native/bindgen/*.*; } | sha256sum)
  native=$runtime/native-$backend-${key:0:12}
  [[ -d $native ]] && return

  begin "fetching the sources of mlx-sys $MLX_SYS" "cargo must reach crates.io, and Cargo.toml must have the versions of mlx/VERSIONS."
  mlx_sys=$(find_mlx_sys)
  local lists=$mlx_sys/src/mlx-c/CMakeLists.txt
  if ! grep -q "MLX_C_VERSION $MLX_C)" "$lists" || ! grep -q "GIT_TAG v$MLX)" "$lists"; then
    fail "mlx-sys $MLX_SYS does not carry mlx-c $MLX_C for MLX $MLX; correct mlx/VERSIONS."
  fi
  grep -q "\"=$BINDGEN\"" "$here/native/bindgen/Cargo.toml" ||
    fail "mlx/native/bindgen/Cargo.toml does not pin bindgen $BINDGEN, as mlx/VERSIONS does."

  begin "building mlx-c $MLX_C against MLX $MLX" "the compiler's message is above; $cxx must know C++20 (gcc 11 or later)."
  rm -rf "$build" "$new"
  mkdir -p "$build" "$new"
  "$tools/bin/cmake" -S "$here/native" -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$tools/bin/ninja" \
    -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release -DMLX_WHEEL="$wheel" -DMLX_C_SOURCE="$mlx_sys/src/mlx-c" \
    --log-level=WARNING >/dev/null
  "$tools/bin/cmake" --build "$build" -- --quiet
  cp "$build/mlx-c/libmlxc.a" "$build/libmlxglue.a" "$new/"

  begin "writing the Rust bindings of mlx-c" "libclang comes from PyPI; a message of bindgen or cargo is above."
  # Run outside of the repository, where Cargo does not read an earlier .cargo/config.toml of it.
  (cd "$repo/.." && MLX_SYS=$mlx_sys cargo build --quiet --locked --manifest-path "$here/native/bindgen/Cargo.toml" \
    --target-dir "$runtime/bindgen")
  LIBCLANG_PATH=$site/clang/native "$runtime/bindgen/debug/mlx-bindings" "$mlx_sys" "$here/native/bindings.h" \
    "$("$cxx" -print-file-name=include)" "$new/bindings.rs"
  rm -rf "$build" "$runtime/bindgen" "$runtime/native-$backend-"*
  mv "$new" "$native"
}

# Prints the path of OpenBLAS, or nothing.
find_openblas() {
  PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | awk '$1 == "libopenblas.so.0" { print $NF; exit }' || true
}

# Prints a value for OPENBLAS_CORETYPE where OpenBLAS is older than the CPU: it then takes its slowest kernels, without AVX.
find_core() {
  grep -qw avx2 /proc/cpuinfo || return 0
  env -u OPENBLAS_CORETYPE python3 -c '
import ctypes, sys
name = ctypes.CDLL(sys.argv[1]).openblas_get_corename
name.restype = ctypes.c_char_p
print("Haswell" if name() == b"Prescott" else "")' "$1" || true
}

# The config is compared at every run, so that an OpenBLAS that came or went is noticed.
write_config() {
  local link="\"-C\", \"link-arg=-Wl,-rpath,$wheel/lib\""
  if [[ -n $openblas ]]; then
    # Linked by the program itself, OpenBLAS comes before the slow BLAS of the wheel when MLX's cblas_* calls are bound.
    link+=", \"-C\", \"link-arg=-Wl,--push-state,--no-as-needed,$openblas,--pop-state\""
  fi
  local environment=""
  [[ -n $core ]] && environment="
[env]
OPENBLAS_CORETYPE = \"$core\"
"
  local text="$config_mark
# It stands in for the build script of mlx-sys, which knows only macOS.
$environment
[target.$triple.mlx]
rustc-link-search = [\"native=$native\", \"native=$wheel/lib\"]
rustc-link-lib = [\"static=mlxc\", \"static=mlxglue\", \"dylib=mlx\", \"dylib=stdc++\"]
rustc-env = { OUT_DIR = \"$native\" }

[target.$triple]
rustflags = [$link]
rustdocflags = [$link]"
  [[ -f $config && $(<"$config") == "$text" ]] && return
  step="writing $config" hint="the folder must be writable."
  mkdir -p "$workspace/.cargo"
  printf '%s\n' "$text" >"$runtime/config.new"
  mv "$runtime/config.new" "$config"
}

# From here on the script runs.
system=$(uname -s)
cxx=${CXX:-c++}
backend=cpu
python=$([[ $system == Darwin ]] && echo no || echo yes)
while (($#)); do
  case $1 in
    --backend) [[ ${2-} == cpu || ${2-} == cuda ]] || fail "--backend takes cpu or cuda."
      backend=$2; shift 2 ;;
    --into) [[ -n ${2-} && -d $2 ]] || fail "--into takes the folder of an application, and '${2-}' is none."
      workspace=$(cd "$2" && pwd -P) python=no; shift 2 ;;
    --python) python=yes; shift ;;
    --no-python) python=no; shift ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    *) fail "unknown argument $1; see mlx/setup.sh --help" ;;
  esac
done

config=$workspace/.cargo/config.toml

case $system in
  Darwin)
    check_macos
    if [[ $python == yes ]]; then
      check_python
      mkdir -p "$runtime"
      make_test_venvs
    fi
    exit ;;
  Linux) ;;
  *) fail "MLX runs on macOS and Linux; this is $system. Build with: cargo build --no-default-features" ;;
esac

check_linux
mkdir -p "$runtime"
# Two runs at a time would write the same files; the second one waits.
exec 9>"$runtime/lock"
if command -v flock >/dev/null; then flock 9; fi

step="asking rustc for its target" hint="rustc must be on the PATH beside cargo."
triple=$(rustc -vV | sed -n 's/^host: //p')

package="mlx-cpu"
[[ $backend == cuda ]] && package="mlx-cuda-13"
make_venv "mlx-$backend" "mlx==$MLX" "$package==$MLX" "cmake==$CMAKE" "ninja==$NINJA" "libclang==$LIBCLANG"
step="looking for the MLX wheel" hint="remove mlx/.runtime and run the script again."
site=$(echo "$runtime/mlx-$backend"/lib/python3*/site-packages)
wheel=$site/mlx
[[ -f $wheel/lib/libmlx.so ]]

build_native
openblas=$(find_openblas)
core=""
[[ -n $openblas ]] && core=$(find_core "$openblas")
write_config
[[ $python == yes ]] && make_test_venvs

where=""
[[ $workspace != "$repo" ]] && where=" for $workspace"
blas="the BLAS of the wheel, which is slow; for OpenBLAS: apt-get install libopenblas0, then this script again"
[[ -n $openblas ]] && blas="OpenBLAS ($openblas${core:+, OPENBLAS_CORETYPE=$core under cargo})"
say "mlx: ready$where. MLX $MLX on $backend, mlx-rs $MLX_RS, $blas."
