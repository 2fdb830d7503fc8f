#!/bin/bash
# make_compiler.sh ROOT: a Debian 13 in the folder ROOT, with clang, LLVM and Mesa's compiler for Apple's GPUs, built from
# Debian's source of Mesa and mesa.patch. Needs root (chroot), debootstrap and 4 GB; two minutes of two cores.
# DEBIAN_MIRROR and DEBIAN_SNAPSHOT: where Debian's packages come from, and Mesa's source once Debian has a later one.
set -euo pipefail

root=$1
here=$(cd "$(dirname "$0")" && pwd)
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
snapshot=${DEBIAN_SNAPSHOT:-https://snapshot.debian.org/archive/debian/20250801T000000Z}
mesa=25.0.7
mesa_sha256=592272df3cf01e85e7db300c449df5061092574d099da275d19e97ef0510f8a6
source=pool/main/m/mesa/mesa_$mesa.orig.tar.xz

inside() { chroot "$root" env DEBIAN_FRONTEND=noninteractive LC_ALL=C nice -n 5 "$@"; }

echo "Debian 13 into $root" >&2
rm -rf "$root"
debootstrap --variant=minbase --include=ca-certificates,curl trixie "$root" "$mirror"
echo "deb $mirror trixie main" >"$root/etc/apt/sources.list"
cp /etc/resolv.conf /etc/hosts "$root/etc/"
inside apt-get update
inside apt-get install -y --no-install-recommends \
  gcc g++ meson ninja-build pkgconf bison flex python3 python3-mako python3-yaml python3-packaging patch xz-utils \
  clang-19 llvm-19 llvm-19-dev libclang-19-dev libclang-cpp19-dev libclc-19 libclc-19-dev libllvmspirvlib-19-dev \
  llvm-spirv-19 spirv-tools libdrm-dev zlib1g-dev libexpat1-dev libzstd-dev libelf-dev libxml2-dev

echo "Mesa $mesa" >&2
mkdir -p "$root/build"
inside curl -sSfL -o /build/mesa.tar.xz "$mirror/$source" || inside curl -sSfL -o /build/mesa.tar.xz "$snapshot/$source"
echo "$mesa_sha256  $root/build/mesa.tar.xz" | sha256sum --check --quiet
tar -C "$root/build" -xf "$root/build/mesa.tar.xz"
inside patch -d "/build/mesa-$mesa" -p1 <"$here/mesa.patch"
inside meson setup /build/out "/build/mesa-$mesa" -Dbuildtype=release -Db_ndebug=false -Dgallium-drivers=asahi \
  -Dvulkan-drivers= -Dplatforms= -Dglx=disabled -Degl=disabled -Dgbm=disabled -Dopengl=false -Dgles1=disabled \
  -Dgles2=disabled -Dllvm=enabled -Dtools=asahi -Dmesa-clc=enabled -Dinstall-mesa-clc=true -Dprecomp-compiler=enabled \
  -Dinstall-precomp-compiler=true -Dvideo-codecs= -Dzstd=disabled -Dshader-cache=disabled -Dxmlconfig=disabled \
  -Dexpat=disabled -Dlmsensors=disabled -Dlibunwind=disabled -Dvalgrind=disabled
inside ninja -C /build/out src/asahi/clc/asahi_clc
cp "$root/build/out/src/asahi/clc/asahi_clc" "$root/usr/local/bin/"
rm -rf "$root/build" "$root/var/cache/apt/archives" "$root/var/lib/apt/lists"
