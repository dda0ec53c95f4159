"""GPU models by the names that ``virtual=`` takes, or from the user's own file, without composing a configuration."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from ptdbench.problems import ConfigError, Problem, first_line, nearest, require, try_these, under
from ptdbench.setup import signature
from ptdbench.virtual.device import Device


def conf_folder() -> Path:
    """Return the folder ``conf``: at the top of a checkout, or inside the package if installed from a wheel."""
    package = Path(__file__).parents[1]
    shipped = package / "conf"
    return shipped if shipped.is_dir() else package.with_name("conf")


def names() -> list[str]:
    """Return the names of all models."""
    return sorted(path.stem for path in _folder().glob("*.yaml") if path.stem != "none")


def load(name: str) -> Device:
    """Return the model of a name, or of a YAML file like those in ``conf/virtual``.

    Raises:
        ConfigError: There is no such model or file, or its figures are impossible.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _folder() / f"{name}.yaml"
    if path.parent == _folder() and name not in names():
        raise ConfigError([Problem("GPU", name, "no such GPU", try_these(nearest(name, names()) or names()))])
    try:
        figures = _figures(path)
    except (OSError, OmegaConfBaseException, YAMLError, KeyError, TypeError, ValueError) as error:
        rule = f"describes no GPU: {first_line(error)}"
        raise ConfigError([Problem("GPU", name, rule, "see conf/virtual/h100.yaml for what it needs")]) from None
    under("gpu", require, *signature.problems(Device, figures, group="gpu"))
    return under("gpu", Device, **figures)


def _figures(path: Path) -> dict[str, Any]:
    """Return the figures of a file, including those it inherits from the models in its defaults."""
    written: Any = OmegaConf.to_container(OmegaConf.load(path))
    bases = [base for base in written.get("defaults", []) if base in names()]
    inherited = [item for base in bases for item in _figures(_folder() / f"{base}.yaml").items()]
    return {**dict(inherited), **written["gpu"]}


def _folder() -> Path:
    return conf_folder() / "virtual"
