"""Local models: bundled, or in the Hub's cache, read without its client, which imports slowly."""

import logging
import os
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from gpt_cli.errors import CheckpointError, ModelNotFoundError, did_you_mean
from gpt_cli.folder.contents import ADAPTER_CONFIG, CONFIG, model_files
from gpt_cli.options.declare import OptionError
from gpt_cli.system.files import read_json

BUNDLED = ("tiny",)
SHORT_NAMES = {
    "distilgpt2": "distilbert/distilgpt2",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}

# Selects files from the names in a folder or a repository; the last one marks a complete download.
Select: TypeAlias = Callable[[Collection[str], str, Callable[[str], Path]], list[str]]

_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
# Pages that are not of models, by the first part of their addresses.
_OTHER_KINDS = ("api", "blog", "collections", "datasets", "docs", "models", "papers", "spaces")
_PAGES_OF_REVISIONS = ("tree", "blob", "resolve", "raw", "commit", "commits")
_PAGES = (*_PAGES_OF_REVISIONS, "discussions")  # of a model
_HUB_ID = re.compile(r"([a-zA-Z0-9][\w.-]*/)?[a-zA-Z0-9_]([\w.-]*\w)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LocalModel:
    """A complete GPT-2 on this machine."""

    name: str  # that `gpt_cli.load` takes
    folder: Path
    origin: str  # "bundled" or "cached"

    @property
    def size(self) -> int:
        """Return the size of all its files in bytes."""
        return sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())


def list_models() -> list[LocalModel]:
    """Return every complete GPT-2 that is bundled or in the Hub's cache; use no network."""
    models = [
        LocalModel(name, folder, "bundled") for name in BUNDLED for folder in _bundled_folders(name)
    ]
    for folder in sorted(cache_folder().glob("models--*/snapshots/*")):
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        models.append(LocalModel(name, folder, "cached"))
    return [model for model in models if _is_complete(model.folder) and _is_gpt2(model.folder)]


def is_on(value: str | None) -> bool:
    """Return whether a variable with this value is on, as the client of the Hub reads it."""
    return (value or "").upper() in ("1", "ON", "YES", "TRUE")


def cache_folder() -> Path:
    """Return the folder of the Hub's cache, from the same variables as its client."""
    home = os.getenv("HF_HOME", f"{os.getenv('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    cache = os.getenv("HF_HUB_CACHE", os.getenv("HUGGINGFACE_HUB_CACHE", f"{home}/hub"))
    return Path(os.path.expandvars(os.path.expanduser(cache)))  # noqa: PTH111 (never raises)


def _bundled_folders(name: str) -> list[Path]:
    """Return the folders in which a bundled model may be."""
    package = Path(__file__).parent.parent
    return [package / "weights" / name, package.parent / "weights" / name]  # wheel, checkout


def bundled(name: str) -> Path:
    """Return the folder of a model that comes with the package."""
    folder = next(filter(Path.is_dir, _bundled_folders(name)), None)
    if folder:
        return folder
    raise ModelNotFoundError(f"the bundled model {name} is missing: reinstall gpt2-cli")


def hub_id(name: str) -> str:
    """Return the Hub id that a model's name, or the address of its page, stands for."""
    name = _name_in_address(name) or name
    repo = SHORT_NAMES.get(name, name)
    if not _HUB_ID.fullmatch(repo) or len(repo) > 96 or "--" in repo or ".." in repo:
        raise ModelNotFoundError(
            f"no model {name!r:.80}{nearest(name)}: give a folder, OWNER/NAME on the Hub, `gpt2`, "
            "or the bundled `tiny`"
        )
    return repo


@cache
def _name_in_address(address: str) -> str | None:
    """Return the name of a model from the address of its page on the Hub; None for another text.

    Log once that the name was taken. Raise ModelNotFoundError for the page of a revision.
    """
    host, *parts = re.sub(r"^https?://|[?#].*", "", address).split("/")
    endpoint_host = os.getenv("HF_ENDPOINT", "").rstrip("/").partition("://")[2]
    names = [part for part in parts[:2] if part and part not in _PAGES]
    if not host or host not in (*_HUB_HOSTS, endpoint_host):
        return None
    if not names or names[0] in _OTHER_KINDS:
        return None
    name = "/".join(names)
    page = parts[len(names) :]
    if len(page) > 1 and page[0] in _PAGES_OF_REVISIONS and page[1] not in ("", "main"):
        cure = f"give {name}, and --revision {unquote(page[1])}"
        raise ModelNotFoundError(f"{address:.80} is the page of a revision: {cure}")
    _log.warning("taking %s from its address", name)  # shown by default
    return name


def short_name(repo: str) -> str:
    """Return the short name of a model on the Hub, or else its id."""
    return next((short for short, full in SHORT_NAMES.items() if full == repo), repo)


def nearest(name: str) -> str:
    """Return a hint at the model or the folder that an unknown name may stand for, or ""."""
    short = short_name(name)
    if os.path.isdir(short):  # noqa: PTH112 (never raises)
        return f" (the folder is ./{short})"
    if short in SHORT_NAMES:
        return ""
    models = (model.name for model in list_models())
    known = [*BUNDLED, *SHORT_NAMES, *SHORT_NAMES.values(), *models]
    with suppress(OSError, ValueError):
        for depth in (0, 1):  # models, and folders of checkpoints
            configs = Path(name).parent.glob("*/" * (depth + 1) + CONFIG)
            known += {str(path.parents[depth]) for path in configs}
    return did_you_mean(name, (other for other in known if other != name))


def check_folder(folder: Path) -> Path:
    """Return the folder of a model; refuse an adapter, and a folder whose subfolders are models."""
    if (folder / CONFIG).exists():
        return folder
    if (folder / ADAPTER_CONFIG).exists():
        raise ModelNotFoundError(
            f"{folder} is an adapter: load its model, with this folder as the option adapter "
            f"(-m MODEL --adapter {folder})"
        )
    models = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if models:  # such as the checkpoints of a training, with their numbers of steps
        newest = max(models, key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)])
        raise ModelNotFoundError(f"{folder} is not a model: give one in it, such as {newest}")
    return folder


def checked_revision(revision: str | None) -> str | None:
    """Return a revision without slashes at its ends; refuse one that could lead out of `refs`."""
    if revision is None:
        return None
    if not revision.isprintable() or not revision.strip("/") or ".." in revision:
        complaint = f"{revision!r:.80} is not valid: give a branch, a tag or a commit"
        raise OptionError("revision", complaint)
    return revision.strip("/")


def cached_snapshot(repo: str, revision: str | None, select: Select = model_files) -> Path | None:
    """Return the folder of a revision in the Hub's cache if its files are complete, else None.

    The default revision is `main`.
    """
    for name in (repo, short_name(repo)):  # other tools may have used the short name
        folder = repo_folder(name)
        commit = revision or ""
        if not _COMMIT.fullmatch(commit):
            commit = _text(folder / "refs" / (revision or "main"))
        snapshot = folder / "snapshots" / commit
        if _COMMIT.fullmatch(commit) and _is_complete(snapshot, select):
            return snapshot
    return None


def cached_commits(repo: str) -> list[str]:
    """Return the commits of a model whose files in the Hub's cache are complete."""
    folders = repo_folder(repo).glob("snapshots/*")
    newest_first = sorted(folders, key=lambda folder: folder.stat().st_mtime, reverse=True)
    return [folder.name for folder in newest_first if _is_complete(folder)]


def _text(path: Path) -> str:
    """Return the text of a small file of the cache, or "" if there is none."""
    with suppress(OSError, ValueError):
        return path.read_text("utf-8").strip()
    return ""


def repo_folder(repo: str) -> Path:
    """Return the folder of a model in the Hub's cache, with all its revisions."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def _is_complete(folder: Path, select: Select = model_files) -> bool:
    try:
        names = {path.name for path in folder.iterdir() if path.is_file()}  # no dangling links
        return bool(select(names, str(folder), folder.joinpath))
    except (OSError, CheckpointError, ModelNotFoundError):
        return False


def _is_gpt2(folder: Path) -> bool:
    try:
        return read_json(folder / CONFIG).get("model_type") == "gpt2"
    except CheckpointError:
        return False
