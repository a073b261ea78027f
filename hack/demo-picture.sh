#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The live page of a broker under load, as a picture for the README: docs/images/page.png.
# Wants Chromium (Debian's package chromium) and bin/ringbatch.
set -euo pipefail
cd "$(dirname "$0")/.."
picture=${1:-docs/images/page.png}
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
  { echo "demo-picture: install Chromium first (apt-get install chromium)" >&2; exit 1; }
work=$(mktemp -d)
./bin/ringbatch demo --http 0 >"$work/demo" 2>&1 &
demo=$!
trap 'kill $demo 2>/dev/null; wait $demo 2>/dev/null || true; rm -rf "$work"' EXIT
url=
for _ in $(seq 300); do
  url=$(grep -o -m1 'http://[^ ]*/dashboard' "$work/demo" || true)
  [ -n "$url" ] && break
  kill -0 $demo 2>/dev/null || break
  sleep 0.1
done
[ -n "$url" ] || { echo "demo-picture: ringbatch demo did not start:" >&2; cat "$work/demo" >&2; exit 1; }
echo "drawing $url for ${SECONDS_OF_LOAD:=60} s"
# The page draws only the time since it was opened, so the browser keeps it open for a
# while, in real time: virtual time would pass at once.
"$browser" --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$work/profile" \
  --window-size=1200,"${HEIGHT:-410}" --timeout=$((SECONDS_OF_LOAD * 1000)) --virtual-time-budget=$((SECONDS_OF_LOAD * 1000)) \
  --screenshot="$work/page.png" "$url" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
[ -s "$work/page.png" ] || { echo "demo-picture: no picture was made:" >&2; tail -5 "$work/log" >&2; exit 1; }
mkdir -p "$(dirname "$picture")"
mv "$work/page.png" "$picture"
echo "$picture"
