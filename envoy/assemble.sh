#!/bin/sh
# Puts pieces into a set-up, for instance
#   envoy/assemble.sh envoy/static-fail-open.yaml envoy/auth/api-key.yaml envoy/limits.yaml > envoy.yaml
# A piece is YAML whose sections go where the set-up says `#+ SECTION`.
set -eu
[ $# -gt 0 ] || { echo "usage: $0 SET-UP [PIECE...] > envoy.yaml" >&2; exit 2; }
setup=$1
shift
exec awk -v setup="$setup" '
    FNR == 1 { file = FILENAME; section = "" }
    file != setup && /^[a-z_]+:$/ { section = $0; sub(/:$/, "", section); from[section] = file; next }
    file != setup && section == "" { if (/^ *(#|$)/) next; complain("line " FNR " belongs to no section") }
    file != setup { lines[section] = lines[section] $0 "\n"; next }
    /^ *#\+ [a-z_]+$/ {
        place = $2
        indent = $0
        sub(/#.*/, "", indent)
        count = split(lines[place], put, "\n")
        for (i = 1; i < count; i++) print (put[i] == "" ? "" : indent put[i])
        delete from[place]
        next
    }
    { print }
    function complain(what) { print file ": " what > "/dev/stderr"; failed = 1; exit 1 }
    END {
        if (failed) exit 1
        for (place in from) {
            print from[place] ": " setup " has no place for `" place "`" > "/dev/stderr"
            exit 1
        }
    }
' "$@" "$setup"
