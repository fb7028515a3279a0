#!/usr/bin/env python3
"""List what an image holds, as SPDX 2.3 in JSON.

In: the image's name and version, the cargo package of its program (or none), and the files that go into
it. Out: the crates that the program is linked from, with licence and checksum as cargo has them, and
every file with its digests and, where the machine's package manager knows one, the package that it is of.
The same input gives the same bytes. Nothing is asked of a network.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TARGET = "x86_64-unknown-linux-gnu"
UNKNOWN = "NOASSERTION"


def output(*command):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, cwd=ROOT).stdout


def crates(package):
    """Every crate that the package's binaries are linked from, with itself, by name and version."""
    listed = output(
        "cargo", "tree", "--locked", "--package", package, "--edges", "normal", "--target", TARGET,
        "--prefix", "none", "--format", "{p}",
    )
    wanted = {tuple(line.split()[:2]) for line in listed.splitlines() if line}
    metadata = json.loads(output("cargo", "metadata", "--locked", "--format-version", "1"))
    with open(os.path.join(ROOT, "Cargo.lock"), "rb") as file:
        locked = {(one["name"], one["version"]): one for one in tomllib.load(file)["package"]}
    for one in sorted(metadata["packages"], key=lambda one: (one["name"], one["version"])):
        if (one["name"], "v" + one["version"]) in wanted:
            yield one, locked[one["name"], one["version"]].get("checksum")


def crate_entry(number, crate, checksum):
    entry = {
        "SPDXID": f"SPDXRef-crate-{number}",
        "name": crate["name"],
        "versionInfo": crate["version"],
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": UNKNOWN,
        # Older crates write a slash where SPDX has OR.
        "licenseDeclared": (crate["license"] or UNKNOWN).replace(" / ", " OR ").replace("/", " OR "),
        "copyrightText": UNKNOWN,
    }
    if checksum:
        entry["downloadLocation"] = f"https://crates.io/api/v1/crates/{crate['name']}/{crate['version']}/download"
        entry["checksums"] = [{"algorithm": "SHA256", "checksumValue": checksum}]
        entry["externalRefs"] = [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:cargo/{crate['name']}@{crate['version']}",
            }
        ]
    return entry


def owner(path):
    """The Debian package of a file, as (name, version), where the machine knows one."""
    if not shutil.which("dpkg-query"):
        return None
    # A library is often installed below /lib and found below /usr/lib, or the other way round.
    for candidate in (path, path.removeprefix("/usr"), "/usr" + path):
        found = subprocess.run(
            ["dpkg-query", "--search", candidate], text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        if found.returncode == 0:
            package = found.stdout.split(": ")[0].split(",")[0]
            return output("dpkg-query", "--show", "--showformat", "${binary:Package} ${Version}", package).split()
    return None


def package_entry(name, version):
    identity = "".join(c if c.isalnum() or c in ".-" else "-" for c in name)
    return {
        "SPDXID": f"SPDXRef-package-{identity}",
        "name": name.split(":")[0],
        "versionInfo": version,
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": UNKNOWN,
        "copyrightText": UNKNOWN,
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": f"pkg:deb/debian/{name.split(':')[0]}@{version}",
            }
        ],
    }


def file_entry(number, destination, source):
    sha1, sha256 = hashlib.sha1(), hashlib.sha256()
    with open(source, "rb") as file:
        while chunk := file.read(1 << 20):
            sha1.update(chunk)
            sha256.update(chunk)
    return {
        "SPDXID": f"SPDXRef-file-{number}",
        "fileName": "./" + destination,
        "checksums": [
            {"algorithm": "SHA1", "checksumValue": sha1.hexdigest()},
            {"algorithm": "SHA256", "checksumValue": sha256.hexdigest()},
        ],
        "licenseConcluded": UNKNOWN,
        "copyrightText": UNKNOWN,
    }


def document(name, version, package, files):
    """The SBOM of an image; `files` maps paths in the image to paths here."""
    image = {
        "SPDXID": "SPDXRef-image",
        "name": name,
        "versionInfo": version,
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": "Apache-2.0" if package else UNKNOWN,
        "copyrightText": UNKNOWN,
        "primaryPackagePurpose": "CONTAINER",
    }
    packages, entries, relations = [image], [], []

    def relate(of, kind, to):
        relations.append({"spdxElementId": of, "relationshipType": kind, "relatedSpdxElement": to})

    relate("SPDXRef-DOCUMENT", "DESCRIBES", image["SPDXID"])
    for number, (crate, checksum) in enumerate(crates(package) if package else ()):
        packages.append(crate_entry(number, crate, checksum))
        relate(image["SPDXID"], "CONTAINS", packages[-1]["SPDXID"])
    known = {}
    for number, (destination, source) in enumerate(sorted(files.items())):
        entries.append(file_entry(number, destination, source))
        relate(image["SPDXID"], "CONTAINS", entries[-1]["SPDXID"])
        found = owner(os.path.realpath(source))
        if not found:
            continue
        if tuple(found) not in known:
            known[tuple(found)] = package_entry(*found)
            packages.append(known[tuple(found)])
            relate(image["SPDXID"], "CONTAINS", packages[-1]["SPDXID"])
        relate(known[tuple(found)]["SPDXID"], "CONTAINS", entries[-1]["SPDXID"])
    content = json.dumps([packages, entries, relations], sort_keys=True).encode()
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": f"{name}-{version}",
        "documentNamespace": f"https://spdx.org/spdxdocs/{name.replace('/', '-')}-{hashlib.sha256(content).hexdigest()}",
        # As the image itself, so that the same content is the same document.
        "creationInfo": {"created": "1970-01-01T00:00:00Z", "creators": ["Tool: ai-inference-sbom.py"]},
        "packages": packages,
        "files": entries,
        "relationships": relations,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, metavar="FILE", help="where it is written")
    parser.add_argument("--name", required=True, metavar="NAME", help="the image's name, without its tag")
    parser.add_argument("--version", required=True, help="the image's tag")
    parser.add_argument("--package", help="cargo package of the image's program")
    parser.add_argument("file", nargs="*", metavar="DESTINATION=SOURCE", help="a file of the image")
    options = parser.parse_args()
    files = dict(pair.split("=", 1) for pair in options.file)
    with open(options.output, "w") as file:
        json.dump(document(options.name, options.version, options.package, files), file, indent=1)
        file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
