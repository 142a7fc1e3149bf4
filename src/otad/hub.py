"""Models and estimators on the Hugging Face Hub, as folders of safetensors and JSON files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from otad.checks import require
from otad.errors import InputError, import_extra
from otad.estimator_folder import load_estimator
from otad.estimators import OTADClassifier, OTADRegressor
from otad.model.folder import CARD, read_card
from otad.model.loading import load
from otad.model.model_card import README, EvaluationLike
from otad.model.otad import OTAD

Model = OTAD | OTADClassifier | OTADRegressor
KINDS = {kind.__name__: kind for kind in (OTADClassifier, OTADRegressor)}
FILES = ["*.json", "*.safetensors"]  # nothing that could hold code
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def push_to_hub(
    model: Model,
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    token: str | None = None,
    evaluation: EvaluationLike | None = None,
) -> str:
    """Upload a model or a fitted estimator to the Hugging Face Hub.

    The files are those of `save`, with the model card as README.md. They contain all training
    points of the bank. So the repository is private unless you say otherwise. This needs the extra
    `hub`.

    Parameters
    ----------
    model : OTAD, OTADClassifier or OTADRegressor
        The model, or a fitted estimator.
    repo_id : str
        The repository, such as "user/model". It is made if it does not exist, and a model in it is
        replaced.
    private : bool
        Whether only you and your organization can read it. If False, everyone can read the
        training points. If True, an existing public repository is refused.
    revision : str or None
        The branch, which is made if it does not exist. If None, the main branch.
    token : str or None
        A token of the Hub. If None, the one that `hf auth login` has stored.
    evaluation : Evaluation or None
        What `otad.evaluate` returned for this model. The model card shows its figures.

    Returns
    -------
    str
        The hash of the commit, by which `from_pretrained` can pin this upload.

    Raises
    ------
    InputError
        If the Hub refuses the upload.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> try:
    ...     otad.push_to_hub(model, "model")
    ... except otad.InputError as error:
    ...     print(error)
    repo_id: expected a name such as user/model, got 'model'
    """
    require(_NAME.fullmatch(repo_id), "repo_id", "a name such as user/model", repr(repo_id))
    with TemporaryDirectory() as place:
        folder = Path(place) / repo_id.partition("/")[2]  # which names the model in its card
        model.save(folder, evaluation=evaluation)
        with _hub_errors(repo_id, "to upload to") as hub:
            return _upload(hub.HfApi(token=token), folder, repo_id, private, revision)


def from_pretrained(
    name: str | Path,
    *,
    revision: str | None = None,
    device: str = "cpu",
    net: nn.Module | Callable[[], nn.Module] | None = None,
    token: str | None = None,
) -> Model:
    """Load a model or an estimator from the Hugging Face Hub, or from a folder.

    Only safetensors and JSON files are downloaded. Nothing is unpickled and no module is imported
    on behalf of the repository, so it cannot run code. Downloads need the extra `hub`; they are
    stored in the cache of the Hub and are not repeated.

    Parameters
    ----------
    name : str or path
        A folder that `save` wrote, or else a repository such as "user/model".
    revision : str or None
        A branch, a tag or the hash of a commit. Only a hash makes sure that the model never
        changes. If None, the main branch.
    device : str
        Where the model goes, such as "cpu" or "cuda".
    net : nn.Module, callable or None
        As in `otad.load`, if the network has a class of your own.
    token : str or None
        A token of the Hub, for private repositories. If None, the one that `hf auth login` has
        stored.

    Returns
    -------
    OTAD, OTADClassifier or OTADRegressor
        What was saved.

    Raises
    ------
    InputError
        If there is no such model, or its files were changed.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> import otad
    >>> model = otad.defend(None, torch.eye(3), torch.arange(3), inputs="pixels", n_neighbors=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     card = model.save(folder)
    ...     print(type(otad.from_pretrained(folder)).__name__)
    OTAD
    """
    folder = Path(name)
    if folder.is_dir():
        expected = "None for a folder on this machine"
        require(revision is None, "revision", expected, repr(revision))
    else:
        known = isinstance(name, str) and _NAME.fullmatch(name)
        expected = "an existing folder, or a repository such as user/model"
        require(known, "name", expected, repr(str(name)))
        with _hub_errors(str(name), "to download from") as hub:
            options = {"revision": revision, "token": token, "allow_patterns": FILES}
            folder = Path(hub.snapshot_download(name, **options))
    about = read_card(folder)["notes"].get("estimator")
    if not isinstance(about, dict):
        return load(folder, net=net, device=device)
    require(net is None, "net", "None for an estimator", type(net).__name__)
    kind = KINDS.get(str(about.get("class")))
    expected = f"an estimator of {', '.join(KINDS)}"
    require(kind is not None, str(folder / CARD), expected, repr(about.get("class")))
    return load_estimator(kind, folder, device)  # type: ignore[arg-type]


def _upload(api: Any, folder: Path, repo_id: str, private: bool, revision: str | None) -> str:
    api.create_repo(repo_id, private=private, exist_ok=True)
    is_public = private and not api.model_info(repo_id).private
    require(not is_public, "private", f"False for {repo_id}, which everyone can read", private)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        revision=revision,
        commit_message="Save a model with otad",
        allow_patterns=[*FILES, README],
        delete_patterns=FILES,  # of the model that was there before
    )
    return str(commit.oid)


@contextmanager
def _hub_errors(repo_id: str, use: str) -> Iterator[Any]:
    """Yield the library of the Hub, and report its errors as ours."""
    hub = import_extra("huggingface_hub", "hub")
    try:
        yield hub
    except (hub.errors.HfHubHTTPError, hub.errors.HFValidationError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{repo_id}: expected a repository {use}, got: {reason}") from error
