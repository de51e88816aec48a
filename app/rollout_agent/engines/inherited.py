"""Which variables of the machine's environment an engine's process gets. Pure.

Invariant: only names on the list pass, and none that speaks of a secret: an engine reads a model from the disk and
answers on loopback, so it has no use for a token, a key, a cloud account or a proxy, and runs code of many packages.
"""

from __future__ import annotations

from collections.abc import Mapping

NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "TZ", "TMP", "TEMP", "TMPDIR", "NO_COLOR",
    "CC", "CXX", "CPATH", "LIBRARY_PATH", "MAX_JOBS", "VIRTUAL_ENV", "CONDA_PREFIX",
})  # fmt: skip
PREFIXES = (
    "LC_", "LD_", "XDG_", "PYTHON", "VLLM_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "TORCH",
    "PYTORCH_", "TRITON_", "FLASHINFER_", "NUMBA_", "CUDA", "CUBLAS", "CUDNN_", "CUTLASS_", "CUTE_", "NVIDIA_",
    "NVTE_", "NV_", "NCCL_", "UCX_", "NVSHMEM_", "GLOO_", "TP_", "DG_", "ROCM_", "ROCR_", "HIP_", "HSA_", "AITER_",
    "MIOPEN_", "RCCL_", "AMD_", "GPU_", "ZE_", "ONEAPI_", "SYCL_", "CCL_", "OMP_", "GOMP_", "KMP_", "MKL_",
    "OPENBLAS_", "NUMEXPR_", "MALLOC_", "TCMALLOC_",
)  # fmt: skip
"""Of the libraries that an engine is made of, of compilers and of the machine's GPUs."""
SECRET = frozenset({
    "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS",
    "APIKEY", "AUTH", "COOKIE", "PROXY",
})  # fmt: skip
"""A name with one of these words between its underscores is never passed on."""


def inherited(base: Mapping[str, str]) -> dict[str, str]:
    """Those of `base` that an engine may have."""
    return {name: value for name, value in base.items() if _wanted(name) and not SECRET & set(name.upper().split("_"))}


def _wanted(name: str) -> bool:
    return name in NAMES or name.startswith(PREFIXES)
