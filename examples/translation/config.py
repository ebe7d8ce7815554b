"""What a run is: model, training and search, as frozen dataclasses read from TOML.

The defaults are the paper's base model. A TOML file may leave keys out, never add unknown ones.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGS = Path(__file__).with_name("configs")


class ConfigError(ValueError):
    """A configuration that can't be used, in one sentence."""


def _require(ok: bool, name: str, value: object, accepted: str) -> None:
    if not ok:
        raise ConfigError(f"{name} must be {accepted}, not {value!r}")


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or value > 0, name, value, "positive")


@dataclass(frozen=True)
class ModelConfig:
    """Size and shape of the Transformer (paper section 3 and Table 3)."""

    vocab_size: int | None = None  # None: that of the prepared corpus
    layers: int = 6  # N, in each stack
    d_model: int = 512
    d_ff: int = 2048
    heads: int = 8  # h
    d_k: int | None = None  # None: d_model / heads
    d_v: int | None = None  # None: d_model / heads
    dropout: float = 0.1  # P_drop: sublayer outputs, embedding + position
    attention_dropout: float = 0.0
    relu_dropout: float = 0.0
    norm: str = "post"  # or "pre"
    norm_eps: float = 1e-6
    positions: str = "sinusoidal"  # or "learned"
    max_positions: int = 1024  # of learned positions

    def __post_init__(self) -> None:
        _require_positive(
            self, "vocab_size", "layers", "d_model", "d_ff", "heads", "d_k", "d_v", "norm_eps"
        )
        _require_positive(self, "max_positions")
        for name in ("dropout", "attention_dropout", "relu_dropout"):
            value = getattr(self, name)
            _require(0 <= value < 1, name, value, "at least 0 and below 1")
        _require(self.norm in ("post", "pre"), "norm", self.norm, "'post' or 'pre'")
        known = ("sinusoidal", "learned")
        _require(self.positions in known, "positions", self.positions, "'sinusoidal' or 'learned'")
        if (self.d_k is None or self.d_v is None) and self.d_model % self.heads:
            raise ConfigError(
                f"d_model {self.d_model} is no multiple of heads {self.heads}: give d_k and d_v"
            )
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ConfigError(f"d_model must be even for sinusoidal positions, not {self.d_model}")

    @property
    def key_dim(self) -> int:
        """d_k of a head."""
        return self.d_k or self.d_model // self.heads

    @property
    def value_dim(self) -> int:
        """d_v of a head."""
        return self.d_v or self.d_model // self.heads


@dataclass(frozen=True)
class TrainingConfig:
    """Optimizer, schedule, batches and what is written when (paper section 5)."""

    seed: int = 1
    tokens_per_update: int = 25000  # target tokens, padding not counted
    max_tokens: int = 3200  # slots of each side in one micro-batch, padding counted
    max_length: int = 256  # longer pairs are left out; EOS counts
    max_steps: int = 100_000
    warmup_steps: int = 4000
    lr_factor: float = 1.0  # multiplies the paper's rate
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_eps: float = 1e-9
    label_smoothing: float = 0.1
    smoothing: str = "exclusive"  # eps/(V-1) each; "uniform": eps/V
    precision: str = "fp32"  # "bf16": under autocast; "auto": that where the device has it
    checkpoint_steps: int = 1500
    keep_checkpoints: int = 5  # the last k, which are averaged at the end
    validate_steps: int = 1500
    log_steps: int = 50

    def __post_init__(self) -> None:
        _require_positive(
            self, "tokens_per_update", "max_tokens", "max_length", "max_steps", "warmup_steps"
        )
        _require_positive(self, "lr_factor", "adam_eps", "checkpoint_steps", "keep_checkpoints")
        _require_positive(self, "validate_steps", "log_steps")
        for name in ("adam_beta1", "adam_beta2", "label_smoothing"):
            value = getattr(self, name)
            _require(0 <= value < 1, name, value, "at least 0 and below 1")
        kinds = ("exclusive", "uniform")
        _require(self.smoothing in kinds, "smoothing", self.smoothing, "'exclusive' or 'uniform'")
        kinds = ("fp32", "bf16", "auto")
        value = self.precision
        _require(value in kinds, "precision", value, "'fp32', 'bf16' or 'auto'")


@dataclass(frozen=True)
class SearchConfig:
    """Beam search (paper section 6.1)."""

    beam: int = 4
    alpha: float = 0.6
    length_penalty: str = "gnmt"  # ((5 + |Y|) / 6)^alpha; "average": |Y|^alpha
    extra_length: int = 50  # output at most source + extra_length tokens, EOS counted in both

    def __post_init__(self) -> None:
        _require_positive(self, "beam", "extra_length")
        _require(self.alpha >= 0, "alpha", self.alpha, "at least 0")
        kinds = ("gnmt", "average")
        value = self.length_penalty
        _require(value in kinds, "length_penalty", value, "'gnmt' or 'average'")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    @staticmethod
    def from_dict(tables: Mapping[str, Mapping[str, Any]], where: str = "config") -> Config:
        """Reads what `dataclasses.asdict` made of one; ConfigError as `load_config`."""
        given = {
            table: {key: value for key, value in values.items() if value is not None}
            for table, values in tables.items()
        }
        return _replaced(Config(), given, where)

    def to_toml(self) -> str:
        """The whole configuration, defaults included, as TOML that `load_config` reads back."""
        lines = []
        for table, values in dataclasses.asdict(self).items():
            lines.append(f"[{table}]")
            # A JSON scalar is a TOML scalar.
            lines += [f"{k} = {json.dumps(v)}" for k, v in values.items() if v is not None]
            lines.append("")
        return "\n".join(lines)


def load_config(name: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads the TOML file at `name`, or the one of that name in configs/; then `key=value` pairs.

    An override's key is written `training.max_steps` or just `max_steps`, its value as in TOML
    (quotes around text may be left out).
    Raises ConfigError for a missing or malformed file, an unknown key, a value of another type or
    out of range; it names the file and the key.
    """
    path = CONFIGS / f"{name}.toml" if (CONFIGS / f"{name}.toml").is_file() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.toml")))
        raise ConfigError(f"no config file {name}; the built-in ones are {known}")
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    config = _replaced(Config(), tables, str(path))
    for override in overrides:
        config = _overridden(config, override)
    return config


def _overridden(config: Config, override: str) -> Config:
    key, equals, text = override.partition("=")
    table, _, name = key.strip().rpartition(".")
    if not equals or not name:
        raise ConfigError(f"--set takes key=value, not {override!r}")
    if not table:
        tables = dataclasses.asdict(config)
        table = next((t for t, values in tables.items() if name in values), "")
        if not table:
            accepted = ", ".join(k for values in tables.values() for k in values)
            raise ConfigError(f"--set {override}: unknown key {name!r}; accepted: {accepted}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    return _replaced(config, {table: {name: value}}, f"--set {override}")


def _replaced(target: Any, values: Mapping[str, Any], where: str, table: str = "") -> Any:
    """A copy of the dataclass `target` with `values`, checked for names and types."""
    hints = typing.get_type_hints(type(target))
    changes = {}
    for key, value in values.items():
        if key not in hints:
            inside = f" in [{table}]" if table else ""
            raise ConfigError(f"{where}: unknown key {key!r}{inside}; accepted: {', '.join(hints)}")
        if dataclasses.is_dataclass(hints[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {key} must be a table, not {value!r}")
            changes[key] = _replaced(getattr(target, key), value, where, key)
        else:
            changes[key] = _typed(value, hints[key], f"{where}: {key}")
    try:
        return dataclasses.replace(target, **changes)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _typed(value: Any, hint: Any, name: str) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        word = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[hint]
        raise ConfigError(f"{name} must be {word}, not {value!r}")
    return value
