"""API keys go from the command's environment to that of each worker, encrypted on the way.

Ray logs the environment of a `runtime_env` in clear and shows it in its dashboard. So before a
worker imports the user's code it puts a public key into Ray's internal key-value store; the command
answers with the API keys sealed for it, and both entries are deleted. A submitted job prints its
public key instead (`jobs.py`). Workers of a Ray of our own inherit the command's environment.

A message is sealed with X25519, HKDF-SHA256 and ChaCha20-Poly1305, from a key pair used once.
Reading the cluster's storage or logs reveals nothing. Whoever can write to the key-value store, or
change what a job prints, can ask with a public key of their own: the cluster's token guards both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from aflow_tune.errors import RunFailed
from aflow_tune.shipping import Code

if TYPE_CHECKING:
    from aflow_tune.config.load import AflowConfig

VARIABLE = "AFLOW_TUNE_KEYS"  # in workers: the namespace under which they ask for the run's keys
_TABLE = "aflow-tune"
_WANTED, _SEALED = "/wanted", "/sealed"

_USUAL = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN"),
    *("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "SWANLAB_API_KEY", "TINKER_API_KEY"),
    *("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"),
    *("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL"),
    *("AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT", "OPENAI_API_VERSION"),
    *("GEMINI_API_KEY", "GOOGLE_API_KEY", "DASHSCOPE_API_KEY", "DEEPSEEK_API_KEY"),
    *("MISTRAL_API_KEY", "GROQ_API_KEY", "OPENROUTER_API_KEY", "TOGETHER_API_KEY"),
    *("FIREWORKS_API_KEY", "XAI_API_KEY", "COHERE_API_KEY", "CO_API_KEY", "MOONSHOT_API_KEY"),
    *("ZHIPUAI_API_KEY", "REPLICATE_API_TOKEN", "TAVILY_API_KEY", "SERPER_API_KEY"),
    *("SERPAPI_API_KEY", "EXA_API_KEY", "E2B_API_KEY", "LANGSMITH_API_KEY"),
    *("LANGFUSE_SECRET_KEY", "LANGFUSE_PUBLIC_KEY", "LANGFUSE_HOST"),
)
"""What clients read by themselves; a base URL goes with its key, which is for no other server."""
_OF_VENDORS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
_OF_THE_NODE = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "TMPDIR", "TEMP", "TMP"),
    *("HOSTNAME", "TERM", "LANG", "DISPLAY", "VIRTUAL_ENV", "OMP_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "CUDA_HOME", "CUDA_PATH", "NLTK_DATA"),
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE"),
    *("TRANSFORMERS_CACHE", "SENTENCE_TRANSFORMERS_HOME", "TORCH_HOME", "TRITON_CACHE_DIR"),
    *("TIKTOKEN_CACHE_DIR", "VLLM_CACHE_ROOT", "WANDB_DIR", "WANDB_CACHE_DIR", "TENSORBOARD_DIR"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
}
_OF_THE_NODE_BY_PREFIX = ("RAY_", "PYTHON", "LD_", "AFLOW_TUNE_", "CONDA_", "XDG_", "LC_", "_")
_WAIT_SECONDS, _POLL_SECONDS = 60.0, 0.1
_SHORTEST_SECRET = 8
_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PWD|CREDENTIALS?)(_|$)",
    re.IGNORECASE,
)


def names_of_keys(config: AflowConfig, code: Code) -> list[str]:
    """Variables of this process to hand to the run's workers; none that belong to a node."""
    external = config.model.external_model
    named = {*_USUAL, *code.variables, *_named_as_keys(config)}
    named |= {str(external.base_url_env)} if external.enable else set()
    return sorted(
        name
        for name in named - _OF_THE_NODE
        if name in os.environ and not name.startswith(_OF_THE_NODE_BY_PREFIX)
    )


def secrets_of(config: AflowConfig, code: Code) -> dict[str, str]:
    """Those of `names_of_keys` whose values (of 8 characters or more) must not travel in clear. One
    that the configuration does not name counts if it is called a key and its value has a digit."""
    named = _named_as_keys(config)
    values = {name: os.environ[name] for name in names_of_keys(config, code)}
    return {
        name: value
        for name, value in values.items()
        if len(value) >= _SHORTEST_SECRET
        and (name in named or (_SECRET.search(name) and re.search(r"\d", value)))
    }


def _named_as_keys(config: AflowConfig) -> set[str]:
    named = set(config.runtime_env.secrets)
    for settings in config.models.values():
        named.add(settings.api_key_env or _OF_VENDORS.get(settings.provider, ""))
        named |= set(settings.headers_env.values())
    external = config.model.external_model
    return named | ({str(external.api_key_env)} if external.enable else set())


@contextlib.contextmanager
def handing_over(names: Sequence[str], namespace: str) -> Iterator[None]:
    """For the block, give these variables of this process to the workers of a namespace."""
    held, ended = {name: os.environ[name] for name in names}, threading.Event()
    thread = threading.Thread(target=_answer, args=(held, namespace, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):  # the cluster may be gone
            _internal_kv_del(_place(namespace), del_by_prefix=True, namespace=_TABLE)


def take_keys() -> None:
    """In a worker: ask for the run's keys, put them into its environment. Raises TimeoutError."""
    namespace = os.environ.get(VARIABLE)
    if not namespace:
        return
    receiver = Receiver()
    own = f"{_place(namespace)}{receiver.public}"
    _internal_kv_put(f"{own}{_WANTED}", receiver.public, namespace=_TABLE)
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (sealed := _internal_kv_get(f"{own}{_SEALED}", namespace=_TABLE)):
        if time.monotonic() > deadline:
            raise TimeoutError("the command that holds this run's keys does not answer")
        time.sleep(_POLL_SECONDS)
    _internal_kv_del(f"{own}{_SEALED}", namespace=_TABLE)
    os.environ.update(receiver.open(sealed))


def _answer(held: dict[str, str], namespace: str, ended: threading.Event) -> None:
    while not ended.wait(_POLL_SECONDS):
        with contextlib.suppress(Exception):  # the head is unreachable: the run reports it
            for key in _internal_kv_list(_place(namespace), namespace=_TABLE):
                name = key.decode()
                public = _internal_kv_get(name, namespace=_TABLE)
                if not name.endswith(_WANTED) or not public:
                    continue
                _internal_kv_del(name, namespace=_TABLE)
                answer = name.removesuffix(_WANTED) + _SEALED
                _internal_kv_put(answer, seal(held, public.decode()), namespace=_TABLE)


def _place(namespace: str) -> str:
    # Hashed: the store lists by prefix, and one namespace may be a prefix of another.
    return f"keys/{hashlib.sha256(namespace.encode()).hexdigest()}/"


class Receiver:
    """One X25519 key pair; `public`, in hex, is what `seal` needs."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw().hex()

    def open(self, sealed: bytes) -> dict[str, str]:
        """The keys by name. RunFailed: they were sealed for another receiver, or changed."""
        sender = X25519PublicKey.from_public_bytes(sealed[:32])
        try:
            cipher = _cipher(self._private, sender, self.public)
            return dict(json.loads(cipher.decrypt(sealed[32:44], sealed[44:], None)))
        except InvalidTag as error:
            raise RunFailed("the keys that arrived were not sealed for this job") from error


def seal(keys: Mapping[str, str], public: str) -> bytes:
    """Encrypt for a receiver: sender's public key (32 bytes), nonce (12), ciphertext."""
    own = X25519PrivateKey.generate()
    receiver = X25519PublicKey.from_public_bytes(bytes.fromhex(public))
    nonce = os.urandom(12)
    content = _cipher(own, receiver, public).encrypt(nonce, json.dumps(dict(keys)).encode(), None)
    return own.public_key().public_bytes_raw() + nonce + content


def _cipher(own: X25519PrivateKey, other: X25519PublicKey, public: str) -> ChaCha20Poly1305:
    derived = HKDF(SHA256(), 32, None, b"aflow-tune keys for " + public.encode())
    return ChaCha20Poly1305(derived.derive(own.exchange(other)))
