#!/usr/bin/env bash
# install-apptainer.sh PREFIX: Apptainer as PREFIX/usr/bin/apptainer, from Debian's packages, for root.
#
# Of Debian's suites only sid holds Apptainer, and that wants a newer libc than a stable Debian has. So nothing of sid is
# installed into the system: its packages are unpacked under PREFIX, and the two programs of Apptainer are told to take
# libc and their other libraries from there. Tools that Apptainer calls come from the system's own Debian.
# Changes outside PREFIX: those tools (apt-get install), and a range of ids for root in /etc/subuid and /etc/subgid.
set -euo pipefail

fail() {
  echo "install-apptainer: $1" >&2
  exit 1
}

[ $# = 1 ] || fail "usage: install-apptainer.sh PREFIX"
[ "$(id -u)" = 0 ] || fail "must run as root"
command -v apt-get > /dev/null || fail "there is no apt-get: this needs Debian"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -s "$keys" ] || fail "$keys is missing: this needs Debian (package debian-archive-keyring)"
mkdir -p "$1" || fail "cannot create $1"
prefix=$(CDPATH= cd -- "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The mirror that this machine uses for its own release; security and other archives hold no sid.
release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
mirror=$(apt-get indextargets --format '$(RELEASE) $(REPO_URI)' 'Created-By: Packages' 'Component: main' \
  | awk -v release="$release" '$1 == release && $2 !~ /security/ { print $2; exit }')
[ -n "$mirror" ] || fail "apt's sources name no mirror of Debian ${release:-(unknown release)}"

# Tools: loading a SIF, writing one, `--fakeroot`, and patchelf for below.
missing=()
for pair in patchelf:patchelf mksquashfs:squashfs-tools newuidmap:uidmap; do
  command -v "${pair%%:*}" > /dev/null || missing+=("${pair#*:}")
done
if [ ${#missing[@]} -gt 0 ]; then
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"; } \
    > "$work/log" 2>&1 || fail "apt-get cannot install ${missing[*]}: $(tail -n 1 "$work/log")"
fi

# An apt of its own for sid: the system's sources, lists and cache stay as they are.
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs"
echo "deb [signed-by=$keys] $mirror sid main" > "$work/sources.list"
sid=(-qq -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root
  -o APT::Update::Error-Mode=any) # a mirror that does not answer is an error, not a warning
libraries=(libc6 libseccomp2 libsqlite3-0) # all that the two programs load
apt-get "${sid[@]}" update > "$work/log" 2>&1 || fail "no lists of sid from $mirror: $(tail -n 1 "$work/log")"
(cd "$work/debs" && apt-get "${sid[@]}" download apptainer/sid "${libraries[@]/%//sid}") > "$work/log" 2>&1 \
  || fail "cannot download Apptainer from $mirror: $(tail -n 1 "$work/log")"
dpkg -x "$work"/debs/apptainer_*.deb "$prefix"
for library in "${libraries[@]}"; do
  dpkg -x "$work/debs/$library"_*.deb "$prefix/libraries"
done

# Only these two programs see the newer libc: an rpath, unlike LD_LIBRARY_PATH, is not passed on to what they start.
loaders=("$prefix"/libraries/usr/lib/*/ld-linux-*.so.*)
starters=("$prefix"/usr/lib/*/apptainer/bin/starter)
for program in "$prefix/usr/bin/apptainer" "${starters[0]}"; do
  patchelf --set-interpreter "${loaders[0]}" --force-rpath --set-rpath "$(dirname "${loaders[0]}")" "$program" \
    || fail "patchelf cannot change $program"
done

# A moved Apptainer takes PREFIX/usr for the root of what Debian has in /, and its starter PREFIX/usr/lib.
for place in usr usr/lib; do
  ln -sfn "$prefix/etc" "$prefix/$place/etc"
  mkdir -p "$prefix/$place/var/lib/apptainer/mnt/session"
done

# Root in a container gets all capabilities, and Apptainer stops where root itself lacks one, as in most containers. There
# it gets those that a container's root has by tradition, as far as they are to be had.
bounds=$((16#$(awk '$1 == "CapBnd:" { print $2 }' /proc/self/status)))
last=$(cat /proc/sys/kernel/cap_last_cap)
if [ "$bounds" != $(((1 << (last + 1)) - 1)) ]; then
  allowed=()
  for capability in 0:CHOWN 1:DAC_OVERRIDE 3:FOWNER 4:FSETID 5:KILL 6:SETGID 7:SETUID 8:SETPCAP 10:NET_BIND_SERVICE \
    13:NET_RAW 18:SYS_CHROOT 27:MKNOD 29:AUDIT_WRITE 31:SETFCAP; do
    [ $((bounds >> ${capability%%:*} & 1)) = 0 ] || allowed+=("CAP_${capability#*:}")
  done
  sed -i 's/^root default capabilities = .*/root default capabilities = file/' "$prefix/etc/apptainer/apptainer.conf"
  "$prefix/usr/bin/apptainer" capability add --user root "$(IFS=, && echo "${allowed[*]}")" > "$work/log" 2>&1 \
    || fail "Apptainer's capabilities of root cannot be set: $(tail -n 1 "$work/log")"
fi

# A build with --fakeroot maps root to a range of ids, even for root.
for file in /etc/subuid /etc/subgid; do
  grep -qs '^root:' "$file" || echo root:100000:65536 >> "$file"
done

version=$("$prefix/usr/bin/apptainer" --version 2> "$work/log") \
  || fail "the installed Apptainer does not start: $(tail -n 1 "$work/log")"
echo "$prefix/usr/bin/apptainer: $version"
