#!/usr/bin/env bash
# Installs the optional baselines into three folders of DIR: [PYTHON=python3] bash docs/baselines.sh DIR
#
# PYTHON is the interpreter that will run them and has torch. Two packages want different versions of apache-tvm-ffi,
# hence the folders. What each package is, and its licence: docs/baselines.md.
set -euo pipefail

dir=$(realpath -m "${1:?usage: [PYTHON=python3] bash docs/baselines.sh DIR}")
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=()

# Without it the extensions ask the GPU, which the building machine need not have.
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
# torch's headers include those of cuBLAS and cuSPARSE; a toolkit without them is helped out by torch's own wheels.
site=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])')
export CPLUS_INCLUDE_PATH=${CPLUS_INCLUDE_PATH:+$CPLUS_INCLUDE_PATH:}$site/nvidia/cu13/include

try() { # NAME COMMAND...: what fails is told at the end and stops nothing else
  echo "== $1"
  "${@:2}" || failed+=("$1")
}

add() { # FOLDER REQUIREMENT...: in one call what shares a folder, since --upgrade replaces whole folders
  "$python" -m pip install -q --no-deps --upgrade --target "$dir/$1" "${@:2}"
}

extension() { # MODULE REQUIREMENT: its setup leaves the module out, or breaks, where it finds no compiler
  if ! command -v nvcc >/dev/null; then
    echo "error: no nvcc on the PATH" >&2
    return 1
  fi
  rm -f "$dir/base/$1".*.so
  add base --no-build-isolation "$2" || return 1
  if ! compgen -G "$dir/base/$1.*.so" >/dev/null; then
    echo "error: $1 was not built; CUDA_HOME must name the toolkit" >&2
    return 1
  fi
}

megablocks() {
  "$python" -m pip download -q --no-deps --no-binary :all: --no-build-isolation -d "$work" megablocks==0.10.0 &&
    tar -xzf "$work/megablocks-0.10.0.tar.gz" -C "$work" &&
    # CUB of CUDA 13 no longer takes this last argument of two calls.
    sed -i -z 's/,\s*debug_synchronous)/)/g' "$work/megablocks-0.10.0/csrc/cumsum.h" &&
    extension megablocks_ops "$work/megablocks-0.10.0"
}

try scattermoe add base git+https://github.com/shawntan/scattermoe@47b5e15
try momoe add base einops==0.8.1 git+https://github.com/tilde-research/MoMoE-impl@d6e2d68
try liger add base liger-kernel==0.8.5
try moe_ops add base moe-ops==0.1.0
try megatron add base megatron-core==0.16.1
try stk add base stanford-stk==0.7.1
# PyPI's grouped-gemm 0.3.0 asks for a GPU while it is being built.
try grouped_gemm extension grouped_gemm_backend git+https://github.com/tgale96/grouped_gemm@ebeae0b
try megablocks megablocks
try deepgemm add deepgemm apache-tvm-ffi==0.1.11 sgl-deep-gemm==0.1.4
try sonicmoe_official add official apache-tvm-ffi==0.1.10 torch-c-dlpack-ext==0.1.5 \
  nvidia-cutlass-dsl==4.4.2 nvidia-cutlass-dsl-libs-base==4.4.2 quack-kernels==0.3.11 sonic-moe==0.1.2.post1

cat <<END

export PYTHONPATH=$dir/base  # scattermoe, momoe, momoe_save_all, liger, moe_ops, megablocks, megatron
export PYTHONPATH=$dir/deepgemm  # deepgemm_pt, deepgemm_pp
export PYTHONPATH=$dir/official:$dir/official/nvidia_cutlass_dsl/python_packages  # sonicmoe_official
END
if ((${#failed[@]})); then
  echo "error: not installed: ${failed[*]}" >&2
  exit 1
fi
