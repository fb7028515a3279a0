# shellcheck shell=bash disable=SC2034,SC2153,SC2154
# Go binaries from the modules under hack/tools, kept in the cache by what they are built from. Of
# Kubernetes there is one module for each minor version, kube-MINOR, which pins its patch.

TOOLS=$ROOT/hack/tools
export GOFLAGS=-mod=readonly GOWORK=off

ASSETS=(etcd kube-apiserver kube-controller-manager kube-scheduler kubectl kind helm)

# pinned MODULE PATH: the version of a dependency that a module under hack/tools requires.
pinned() {
  grep -oP "(^|\s)\Q$2\E \Kv\S+" "$TOOLS/$1/go.mod"
}

# kubernetes_minors: the minor versions that can be built, oldest first; the newest is the default.
kubernetes_minors() {
  printf '%s\n' "$TOOLS"/kube-*/go.mod | sed 's|.*/kube-\(.*\)/go.mod|\1|' | sort -V
}

# pinned_kubernetes MINOR: the version that is built of it, like v1.37.2.
pinned_kubernetes() {
  pinned "kube-$1" k8s.io/kubernetes
}

# kubernetes_versions: all of them in one line.
kubernetes_versions() {
  local minor version versions=()
  for minor in $(kubernetes_minors); do
    version=$(pinned_kubernetes "$minor")
    versions+=("${version#v}")
  done
  echo "${versions[*]}"
}

# minor_of VERSION: 1.37 of v1.37.2.
minor_of() {
  local version=${1#v}
  echo "${version%.*}"
}

# select_kubernetes [VERSION]: sets kubernetes (like v1.37.2) and kubernetes_module, from which all
# of Kubernetes' binaries come. VERSION is a minor version or its pinned patch; without one it is the
# newest.
select_kubernetes() {
  local wanted=${1:-} minor
  wanted=${wanted#v}
  for minor in $(kubernetes_minors); do
    kubernetes_module=kube-$minor
    kubernetes=$(pinned_kubernetes "$minor")
    [[ $wanted != "$minor" && v$wanted != "$kubernetes" ]] || return 0
  done
  [[ -z $wanted ]] || die "Kubernetes $wanted cannot be built; there are: $(kubernetes_versions)" \
    "(hack/tools/kube-MINOR pins each)"
}

# Sets module, package, tags, version_flags and cgo for a binary's name.
binary_recipe() {
  local containerd=github.com/containerd/containerd/v2
  local plugins=github.com/containernetworking/plugins/plugins
  module=node tags='' version_flags='' cgo=0
  case $1 in
    kube*) module=$kubernetes_module package=k8s.io/kubernetes/cmd/$1 version_flags=$(kubernetes_version_flags) ;;
    etcd) package=go.etcd.io/etcd/server/v3 ;;
    containerd | containerd-shim-runc-v2 | ctr)
      package=$containerd/cmd/$1 tags=no_btrfs,no_zfs,no_devmapper
      version_flags="-X $containerd/version.Version=$(pinned node $containerd)"
      ;;
    # Without the tag runc refuses every pod, since their default is to ask for seccomp.
    runc) package=github.com/opencontainers/runc tags=seccomp cgo=1 ;;
    ptp | loopback) package=$plugins/main/$1 ;;
    host-local) package=$plugins/ipam/$1 ;;
    portmap) package=$plugins/meta/$1 ;;
    coredns) module=coredns package=. ;;
    crictl) module=crictl package=sigs.k8s.io/cri-tools/cmd/crictl ;;
    local-path-provisioner) module=$1 package=github.com/rancher/$1 ;;
    kind) module=kind package=sigs.k8s.io/kind ;;
    helm) module=helm package=helm.sh/helm/v4/cmd/helm ;;
    *) die "no recipe to build $1" ;;
  esac
}

# A component without a version falls back to the feature gates of an unknown release.
kubernetes_version_flags() {
  local package=k8s.io/component-base/version minor=${kubernetes#v*.}
  printf -- '-X %s.gitVersion=%s -X %s.gitMajor=1 -X %s.gitMinor=%s -X %s.gitTreeState=clean' \
    $package "$kubernetes" $package $package "${minor%%.*}" $package
}

# The key of a module's binaries: its pins, its sources, the recipe and the compiler.
module_key() {
  (
    cd "$TOOLS/$1" || exit
    sha256sum go.mod go.sum
    find . -name '*.go' -exec sha256sum {} + | sort
    declare -f binary_recipe kubernetes_version_flags compile
    go env GOVERSION GOARCH
  ) | hash_text
}

# Sets target to where a binary is kept. Reading the key of a module takes a moment, and a run asks
# for the same ones many times: `build` fills this before subshells ask again.
declare -A module_folders
locate() {
  local module package tags version_flags cgo
  binary_recipe "$1"
  [[ -n ${module_folders[$module]:-} ]] ||
    module_folders[$module]=$CACHE/build/$module-$(module_key "$module")
  target=${module_folders[$module]}/$1
}

compile() (
  cd "$TOOLS/$module" || exit
  CGO_ENABLED=$cgo go build -trimpath -buildvcs=false -tags "$tags" \
    -ldflags "-s -w $version_flags" -o "$1" "$package"
)

# build NAME…: makes the binaries that are not in the cache yet.
build() {
  local name target missing=()
  for name; do
    locate "$name"
    [[ -x $target ]] || missing+=("$name")
  done
  ((${#missing[@]})) || return 0
  lock 8 build
  for name in "${missing[@]}"; do
    build_binary "$name"
  done
  exec 8>&-
}

build_binary() {
  local module package tags version_flags cgo target
  locate "$1"
  # Another run may have built it while this one waited.
  [[ ! -x $target ]] || return 0
  binary_recipe "$1"
  if ((cgo)); then
    install_missing gcc=gcc /usr/include/stdlib.h=libc6-dev pkg-config=pkg-config \
      /usr/include/seccomp.h=libseccomp-dev
  fi
  log "building $1"
  mkdir -p "${target%/*}"
  quietly "build-$1" compile "$target.partial"
  mv "$target.partial" "$target"
  # Other checkouts may still use a module's other keys, but not for ever.
  find "$CACHE/build" -maxdepth 1 -name "$module-*" ! -path "${target%/*}" -mtime +7 -exec rm -rf {} +
}

# binary NAME: the path of a binary that `build` made.
binary() {
  local target
  locate "$1"
  echo "$target"
}

# One folder with what tests of the API level need, whatever modules it comes from.
collect_assets() {
  local name target key
  key=$(for name in "${ASSETS[@]}"; do binary "$name"; done | hash_text)
  assets_folder=$CACHE/assets/$key
  mkdir -p "$assets_folder"
  for name in "${ASSETS[@]}"; do
    target=$(binary "$name")
    [[ $(readlink "$assets_folder/$name") == "$target" ]] || ln -sfn "$target" "$assets_folder/$name"
  done
}
