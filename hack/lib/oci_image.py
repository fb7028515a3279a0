#!/usr/bin/env python3
"""Write an OCI image archive from a root folder, without a registry or a container engine.

The archive holds one uncompressed layer and loads with `docker load`, `ctr images import` and
`kind load image-archive`. The same input gives the same bytes: names are sorted, times are zero
and files belong to root unless asked otherwise, so an image's digest changes only when its content does.
"""

import argparse
import hashlib
import io
import json
import os
import platform
import stat
import sys
import tarfile
import tempfile

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
DEFAULT_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class HashingWriter:
    """A file that remembers the digest and length of what was written to it."""

    def __init__(self, out):
        self.out = out
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data):
        self.sha256.update(data)
        self.size += len(data)
        return self.out.write(data)

    def descriptor(self, media_type):
        return {
            "mediaType": media_type,
            "digest": "sha256:" + self.sha256.hexdigest(),
            "size": self.size,
        }


def walk(root):
    """Yield (archive name, path) of everything below root, parents first, in byte order."""
    pending = [""]
    while pending:
        relative = pending.pop()
        path = os.path.join(root, relative)
        if relative:
            yield relative, path
        if os.path.isdir(path) and not os.path.islink(path):
            children = sorted(os.listdir(path), key=os.fsencode, reverse=True)
            pending.extend(os.path.join(relative, child) for child in children)


def tar_entry(tar, name, path, hardlinks, preserve_owners):
    """The normalised tar header of one path, or None for what an image cannot hold."""
    status = os.lstat(path)
    if stat.S_ISSOCK(status.st_mode):
        return None
    # gettarinfo makes a hard link of a file only if this very TarFile has seen its inode; the
    # bookkeeping is done here so that it depends on the sorted order alone.
    tar.inodes = {}
    info = tar.gettarinfo(path, arcname=name)
    if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
        first = hardlinks.setdefault((status.st_dev, status.st_ino), name)
        if first != name:
            info.type, info.linkname, info.size = tarfile.LNKTYPE, first, 0
    if not preserve_owners:
        info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = 0
    return info


def write_layer(root, out, preserve_owners=False):
    writer = HashingWriter(out)
    hardlinks = {}
    with tarfile.open(fileobj=writer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, path in walk(root):
            info = tar_entry(tar, name, path, hardlinks, preserve_owners)
            if info is None:
                continue
            if info.isreg():
                with open(path, "rb") as content:
                    tar.addfile(info, content)
            else:
                tar.addfile(info)
    return writer.descriptor(LAYER_TYPE)


def blob(value, media_type):
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    return data, {"mediaType": media_type, "digest": digest, "size": len(data)}


def image_config(options, layer):
    env = options.env
    if not any(item.startswith("PATH=") for item in env):
        env = [DEFAULT_PATH] + env
    config = {"Env": env, "WorkingDir": options.workdir}
    if options.entrypoint:
        config["Entrypoint"] = options.entrypoint
    if options.user:
        config["User"] = options.user
    if options.stop_signal:
        config["StopSignal"] = options.stop_signal
    if options.label:
        config["Labels"] = dict(options.label)
    return {
        "created": "1970-01-01T00:00:00Z",
        "architecture": options.architecture,
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": "oci_image.py"}],
    }


def image_index(options, manifest):
    entries = []
    for name in options.name:
        entries.append(
            dict(
                manifest,
                platform={"architecture": options.architecture, "os": "linux"},
                annotations={
                    "io.containerd.image.name": canonical(name),
                    "org.opencontainers.image.ref.name": name.rsplit(":", 1)[1],
                },
            )
        )
    return {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": entries}


def canonical(name):
    """The full name that containerd stores: docker.io and library/ are only implied in short ones."""
    first, slash, _ = name.partition("/")
    if not slash:
        return "docker.io/library/" + name
    if "." in first or ":" in first or first == "localhost":
        return name
    return "docker.io/" + name


def blob_path(descriptor):
    return "blobs/" + descriptor["digest"].replace(":", "/")


def put(tar, name, size, content):
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    tar.addfile(info, content)


def write_archive(options, layer, layer_file, out):
    config_data, config = blob(image_config(options, layer), CONFIG_TYPE)
    manifest_data, manifest = blob(
        {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "config": config, "layers": [layer]},
        MANIFEST_TYPE,
    )
    index_data, _ = blob(image_index(options, manifest), INDEX_TYPE)
    # Engines that predate OCI archives (docker before 25) read this file instead of index.json.
    docker_data, _ = blob(
        [{"Config": blob_path(config), "RepoTags": options.name, "Layers": [blob_path(layer)]}], ""
    )
    small = [
        ("oci-layout", b'{"imageLayoutVersion":"1.0.0"}'),
        ("index.json", index_data),
        ("manifest.json", docker_data),
        (blob_path(config), config_data),
        (blob_path(manifest), manifest_data),
    ]
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for name, data in small:
            put(tar, name, len(data), io.BytesIO(data))
        put(tar, blob_path(layer), layer["size"], layer_file)
    return manifest["digest"]


def json_list(text):
    value = json.loads(text)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError("must be a JSON list of strings")
    return value


def assignment(text):
    if text.find("=") < 1:
        raise argparse.ArgumentTypeError("must look like KEY=VALUE")
    return text


def tagged(text):
    if ":" not in text.rsplit("/", 1)[-1]:
        raise argparse.ArgumentTypeError("must look like NAME:TAG")
    return text


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, metavar="FILE", help="archive to write")
    parser.add_argument(
        "--name", required=True, action="append", type=tagged, metavar="NAME:TAG",
        help="image name; may be repeated for further names of the same image",
    )
    parser.add_argument("--root", required=True, metavar="DIR", help="folder that becomes /")
    parser.add_argument("--entrypoint", type=json_list, metavar="JSON", help="list of strings")
    parser.add_argument("--user", metavar="UID", help="user that the container runs as")
    parser.add_argument("--env", action="append", default=[], type=assignment, metavar="K=V")
    parser.add_argument(
        "--label", action="append", default=[], metavar="K=V",
        type=lambda text: assignment(text).split("=", 1),
    )
    parser.add_argument("--workdir", default="/", metavar="DIR", help="default: /")
    parser.add_argument("--stop-signal", metavar="NAME", help="signal that stops the container")
    parser.add_argument(
        "--preserve-owners", action="store_true", help="keep user and group ids instead of 0:0"
    )
    parser.add_argument(
        "--architecture", default=ARCHITECTURES.get(platform.machine(), platform.machine()),
        help="default: this machine's",
    )
    options = parser.parse_args()
    if not os.path.isdir(options.root):
        parser.error(f"--root {options.root}: not a folder")
    return options


def main():
    options = parse_arguments()
    folder = os.path.dirname(os.path.abspath(options.output))
    os.makedirs(folder, exist_ok=True)
    # The digest names the layer inside the archive, so the layer has to be complete before the
    # archive is written; a temporary file beside the output keeps it out of memory.
    with tempfile.TemporaryFile(dir=folder) as layer_file:
        layer = write_layer(options.root, layer_file, options.preserve_owners)
        layer_file.seek(0)
        partial = f"{options.output}.{os.getpid()}.partial"
        try:
            with open(partial, "wb") as out:
                digest = write_archive(options, layer, layer_file, out)
            os.replace(partial, options.output)
        except BaseException:
            if os.path.exists(partial):
                os.unlink(partial)
            raise
    print(digest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
