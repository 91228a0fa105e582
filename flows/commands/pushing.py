"""Push an exported folder to the Hugging Face hub as a dataset."""

from __future__ import annotations

from pathlib import Path

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from agentr_core.errors import ConfigError, EndpointError
from agentr_core.exchange.verl import SCRIPT
from tasks.wiring import hub_access


def check_push(repo: str) -> None:
    """Raise `ConfigError` for a name that no dataset can have, and if HF_TOKEN is not set. Called
    before anything is written.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo_is_name = False
    else:
        repo_is_name = repo.count("/") == 1
    if not repo_is_name:
        raise ConfigError(f"--push {repo}: write OWNER/NAME, of letters, digits, dots, dashes and underscores")
    if not hub_access().token:
        raise ConfigError(
            "--push needs a token of the hub that may write: set HF_TOKEN in the environment; one that is saved "
            "elsewhere is not read"
        )


def push(folder: Path, repo: str, *, message: str) -> str:
    """Add the files of a folder to a dataset of the hub in one commit, and return the dataset's
    address. If there is no such dataset, create a private one. verl's script stays here: it names
    directories of this machine.

    Raises `EndpointError` if the hub refuses or cannot be reached; then none of the files is in the
    dataset.
    """
    access = hub_access()
    api = HfApi(endpoint=access.address or None, token=access.token)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SCRIPT)
    # `upload_folder` splits a large folder into several commits, and may stop after the first.
    operations = [
        CommitOperationAdd(path_in_repo=path.relative_to(folder).as_posix(), path_or_fileobj=path) for path in files
    ]
    state = f"the export is whole in {folder}, but it was not pushed"
    try:
        address = api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        api.create_commit(repo, operations, commit_message=message, repo_type="dataset")
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = {401: "does not know the token", 403: "lets the token not write there"}.get(status, f"says {status}")
        words = error.server_message or ""
        raise EndpointError(f"{state}: {api.endpoint} {reason}{f' ({words})' if words else ''}") from error
    except ValueError as error:
        # Such as a licence that the hub does not have.
        raise EndpointError(f"{state}: {api.endpoint} does not take the head of README.md ({error})") from error
    except OfflineModeIsEnabled as error:
        raise EndpointError(f"{state}: HF_HUB_OFFLINE is set; take it out of the environment") from error
    except (httpx2.TransportError, OSError) as error:
        raise EndpointError(f"{state}: {api.endpoint} cannot be reached ({type(error).__name__})") from error
    return str(address)
