# shellcheck shell=bash disable=SC2034,SC2153,SC2154
# The image of a kind node: pulled where a registry can be reached, else built from Debian packages
# and the Go modules under hack/tools.

NODE_REPOSITORY=localhost/ai-inference/kind-node
DEBIAN_RELEASE=bookworm # its systemd still runs on cgroup v1, a later release's does not
ROOTFS_PACKAGES=(systemd conntrack iptables nftables iproute2 ethtool util-linux mount kmod libseccomp2
  pigz e2fsprogs bash busybox-static ca-certificates curl hostname jq procps socat findutils grep sed gawk)

CONTROL_PLANE=(kube-apiserver kube-controller-manager kube-scheduler)
NODE_BINARIES=(kubelet kubeadm kubectl "${CONTROL_PLANE[@]}" kube-proxy containerd
  containerd-shim-runc-v2 ctr runc ptp loopback host-local portmap etcd coredns crictl
  local-path-provisioner kind)

has_image() {
  docker image inspect "$1" >/dev/null 2>&1
}

# Sets node_image, of the selected Kubernetes.
ensure_node_image() {
  local built
  node_image=kindest/node:$kubernetes
  has_image "$node_image" && return
  built=$(built_image)
  if has_image "$built"; then
    node_image=$built
    return
  fi
  log "pulling $node_image"
  if pull_image "$node_image"; then
    return
  fi
  log "$node_image cannot be pulled: building a node image"
  node_image=$built
  build_node_image
}

# Gives up soon when no registry answers, but lets a download that has begun take its time.
pull_image() {
  local out=$LOGS/pull.log
  mkdir -p "$LOGS"
  timeout 1200 docker pull "$1" >"$out" 2>&1 9>&- &
  pull=$!
  wait_until 20 pull_decided "$out" || kill "$pull"
  wait "$pull" 2>/dev/null
}

pull_decided() {
  grep -q 'Pulling from' "$1" || ! kill -0 "$pull" 2>/dev/null
}

rootfs_key() {
  printf '%s\n' "$DEBIAN_RELEASE" "${ROOTFS_PACKAGES[@]}" | hash_text
}

# The tag changes with whatever goes into the image.
built_image() {
  local module key
  key=$(
    rootfs_key
    for module in "$kubernetes_module" node coredns crictl local-path-provisioner kind; do
      module_key "$module"
    done
    cat "$LIB"/node/* "$LIB/node_image.sh" "$ROOT/hack/lib/oci_image.py"
  )
  echo "$NODE_REPOSITORY:$kubernetes-$(hash_text <<<"$key")"
}

build_node_image() {
  require_root "building a node image"
  install_missing debootstrap=debootstrap gcc=gcc /usr/include/stdlib.h=libc6-dev jq=jq \
    python3=python3
  make_rootfs
  build "${NODE_BINARIES[@]}"
  log "assembling the node image of Kubernetes ${kubernetes#v}"
  work=$CACHE/work
  exit_steps+=(remove_work)
  remove_work
  mkdir -p "$work/images"
  quietly node-image assemble
  log "loading the node image into Docker"
  quietly node-image-load docker load --input "$work/node.tar"
  remove_work
  remove_old_node_images
}

remove_work() {
  [[ -z ${containerd_pid:-} ]] || kill "$containerd_pid" 2>/dev/null || true
  rm -rf "$work"
}

remove_old_node_images() {
  local image
  for image in $(docker image ls --format '{{.Repository}}:{{.Tag}}' "$NODE_REPOSITORY"); do
    # Those of other versions are as good as they were.
    [[ $image == "$NODE_REPOSITORY:$kubernetes-"* ]] || continue
    # One that a cluster still uses stays.
    [[ $image == "$node_image" ]] || docker image rm "$image" >/dev/null 2>&1 || true
  done
}

make_rootfs() {
  rootfs=$CACHE/rootfs/$(rootfs_key)
  [[ ! -d $rootfs ]] || return 0
  log "unpacking Debian $DEBIAN_RELEASE"
  rm -rf "$rootfs.partial"
  mkdir -p "${rootfs%/*}"
  # In a mount namespace, so that a killed run leaves no mounts in what the next one deletes.
  quietly debootstrap unshare --mount debootstrap --variant=minbase \
    --include="$(IFS=,; echo "${ROOTFS_PACKAGES[*]}")" "$DEBIAN_RELEASE" "$rootfs.partial"
  rm -rf "$rootfs.partial"/var/cache/apt/archives/*.deb "$rootfs.partial"/var/lib/apt/lists/*
  mv "$rootfs.partial" "$rootfs"
}

# Runs under `quietly`; the steps are in the order in which they need each other.
assemble() {
  kind_source=$(cd "$TOOLS/kind" && go mod download sigs.k8s.io/kind && go list -m -f '{{.Dir}}' sigs.k8s.io/kind)
  node=$work/node
  cp -a --reflink=auto "$rootfs" "$node"
  install_kind_files
  install_node_binaries
  configure_containerd
  write_manifests
  write_images
  import_images
  rm -rf "${node:?}"/{proc,sys,dev}/*
  "$ROOT/hack/lib/oci_image.py" --output "$work/node.tar" --name "$node_image" --root "$node" \
    --preserve-owners --stop-signal SIGRTMIN+3 --env container=docker \
    --entrypoint '["/usr/local/bin/entrypoint", "/sbin/init"]'
}

# kind's own base image is made of the same files, and of the same services switched off and on.
install_kind_files() {
  local files=$kind_source/images/base/files units=$node/lib/systemd/system unit
  mkdir -p "$node"/kind/manifests "$node"/etc/kubernetes/manifests
  cp -r --no-preserve=mode,ownership "$files"/{etc,kind,usr} "$node"/
  chmod 755 "$node"/kind/bin/* "$node"/usr/local/bin/*
  rm -f "$units"/{multi-user,local-fs,basic}.target.wants/* "$node"/etc/systemd/system/*.wants/* \
    "$units"/sysinit.target.wants/systemd-tmpfiles-setup.service \
    "$units"/sockets.target.wants/*{udev,initctl}*
  echo 'ReadKMsg=no' >>"$node/etc/systemd/journald.conf"
  ln -sf /usr/lib/systemd/systemd "$node/sbin/init"
  for unit in kubelet containerd undo-mount-hacks; do
    chroot "$node" systemctl enable "$unit.service"
  done
  # It would register formats in a part of the kernel that all containers share.
  chroot "$node" systemctl mask systemd-binfmt.service
  # kind reads the version without its newline.
  printf '%s' "$kubernetes" >"$node/kind/version"
}

install_node_binaries() {
  install_binaries "$node/usr/bin" kubelet kubeadm kubectl
  install_binaries "$node/usr/local/bin" containerd containerd-shim-runc-v2 ctr crictl
  install_binaries "$node/usr/local/sbin" runc
  install_binaries "$node/opt/cni/bin" ptp loopback host-local portmap
}

install_binaries() {
  local folder=$1 name
  shift
  mkdir -p "$folder"
  for name; do
    install -m 755 "$(binary "$name")" "$folder/$name"
  done
}

kubeadm_images() {
  "$(binary kubeadm)" config images list --kubernetes-version "$kubernetes"
}

# kubeadm_image NAME: the name under which kubeadm, and so the cluster, looks for a component.
kubeadm_image() {
  kubeadm_images | grep "/$1:"
}

configure_containerd() {
  local config=$node/etc/containerd/config.toml
  # Without CAP_SYS_RESOURCE no process can lower its oom_score_adj, and no pod would start.
  sed -i -e "s|^\( *sandbox_image = \).*|\1\"$(kubeadm_image pause)\"|" \
    -e 's|^\( *restrict_oom_score_adj = \).*|\1true|' \
    -e '/tolerate_missing_hugepages_controller/d' "$config"
  grep -q 'restrict_oom_score_adj = true' "$config"
  "$(binary ctr)" oci spec | jq 'del(.process.rlimits)
    | .hooks.createContainer += [{"path": "/kind/bin/mount-product-files.sh"}]' \
    >"$node/etc/containerd/cri-base.json"
}

kind_constant() {
  sed -n "s|^const $1 = \"\(.*\)\"|\1|p" "$kind_source/pkg/build/nodeimage/const_storage.go"
}

write_manifests() {
  local manifests=$node/kind/manifests
  cp "$LIB/node/cni.yaml" "$manifests/default-cni.yaml"
  sed -e '1,/^const defaultStorageManifest = /d' -e '/^`/,$d' \
    -e "s|\` + storageProvisionerImage + \`|$(kind_constant storageProvisionerImage)|" \
    -e "s|\` + storageHelperImage + \`|$(kind_constant storageHelperImage)|" \
    "$kind_source/pkg/build/nodeimage/const_storage.go" >"$manifests/default-storage.yaml"
  grep -q 'is-default-class: "true"' "$manifests/default-storage.yaml"
}

# The components' images under the names that kubeadm and kind ask for. They hold what was built
# here, not what those names hold elsewhere, and never leave the node.
write_images() {
  local name
  for name in "${CONTROL_PLANE[@]}"; do
    component_image "$name" "$(kubeadm_image "$name")"
  done
  component_image etcd "$(kubeadm_image etcd)"
  component_image local-path-provisioner "$(kind_constant storageProvisionerImage)"
  install -D -m 755 "$(binary coredns)" "$work/root/coredns"
  write_image coredns "$(kubeadm_image coredns)" --entrypoint '["/coredns"]'
  mkdir -p "$work/root"
  gcc -Os -static -s -o "$work/root/pause" "$LIB/node/pause.c"
  write_image pause "$(kubeadm_image pause)" --entrypoint '["/pause"]' --user 65535:65535
  install_busybox
  write_image local-path-helper "$(kind_constant storageHelperImage)"
  write_network_images
}

component_image() {
  install_binaries "$work/root/usr/local/bin" "$1"
  write_image "$1" "$2"
}

# write_image FILE NAME OPTION…: packs $work/root and clears it.
write_image() {
  local file=$1 name=$2
  shift 2
  mkdir -p "$work/root/tmp"
  chmod 1777 "$work/root/tmp"
  "$ROOT/hack/lib/oci_image.py" --output "$work/images/$file.tar" --name "$name" --root "$work/root" "$@"
  rm -rf "$work/root"
}

install_busybox() {
  mkdir -p "$work/root"/{bin,etc}
  install -m 755 "$node/bin/busybox" "$work/root/bin/busybox"
  local applet
  for applet in $("$node/bin/busybox" --list); do
    [[ $applet == busybox ]] || ln -s busybox "$work/root/bin/$applet"
  done
}

write_network_images() {
  install_iptables
  install_binaries "$work/root/usr/local/bin" kube-proxy
  write_image kube-proxy "$(kubeadm_image kube-proxy)"
  install_iptables
  install_busybox
  install_binaries "$work/root/usr/local/bin" kubectl
  cp "$LIB/node/cni.sh" "$work/root/cni.sh"
  write_image pod-network "$(sed -n 's|^ *image: ||p' "$LIB/node/cni.yaml")"
}

# The firewall tools of the node's own Debian with every library they need; that includes what
# iptables loads by name at run time, without which it works but accepts no rule.
install_iptables() {
  local root=$work/root extensions name
  mkdir -p "$root"/{usr/sbin,usr/bin,usr/lib,usr/lib64,etc,run}
  for name in bin sbin lib lib64; do
    ln -s "usr/$name" "$root/$name"
  done
  extensions=$(cd "$node" && echo usr/lib/*/xtables)
  mkdir -p "$root/$extensions"
  cp -r "$node/$extensions/." "$root/$extensions/"
  cp "$node"/usr/sbin/{xtables-nft-multi,xtables-legacy-multi,nft,conntrack} "$root/usr/sbin/"
  cp "$node/etc/protocols" "$root/etc/" 2>/dev/null || true
  for name in ip{,6}tables{,-save,-restore}; do
    ln -s xtables-nft-multi "$root/usr/sbin/$name"
  done
  copy_libraries /usr/sbin/{xtables-nft-multi,xtables-legacy-multi,nft,conntrack} \
    "/$extensions"/*.so
}

copy_libraries() {
  local library
  # Resolved inside the node's root: the machine that builds may be of another release.
  while read -r library; do
    mkdir -p "$work/root${library%/*}"
    cp -Ln "$node$library" "$work/root$library"
  done < <(chroot "$node" ldd "$@" 2>/dev/null |
    awk '$2 == "=>" && $3 ~ /^\// {print $3} $1 ~ /^\/.*ld-linux/ {print $1}' | sort -u)
}

# Puts the images where the node's containerd keeps them, by a containerd of the same version.
import_images() {
  local run=$work/containerd archive
  mkdir -p "$run"
  cat >"$run/config.toml" <<EOF
version = 3
root = "$node/var/lib/containerd"
state = "$run/state"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
  "io.containerd.nri.v1.nri"]
[grpc]
  address = "$run/sock"
EOF
  setpriv --pdeathsig KILL "$(binary containerd)" --config "$run/config.toml" 9>&- &
  containerd_pid=$!
  wait_until 30 "$(binary ctr)" --address "$run/sock" version
  for archive in "$work"/images/*.tar; do
    "$(binary ctr)" --address "$run/sock" --namespace k8s.io images import --no-unpack \
      --label io.cri-containerd.pinned=pinned --label io.cri-containerd.image=managed "$archive"
  done
  kill "$containerd_pid"
  wait "$containerd_pid" || true
  containerd_pid=
}
