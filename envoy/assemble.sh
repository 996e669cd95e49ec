#!/bin/sh
# Puts pieces into a set-up, for instance
#   envoy/assemble.sh envoy/static-fail-open.yaml envoy/auth/api-key.yaml envoy/limits.yaml > envoy.yaml
# A piece is YAML whose sections go where the set-up says `#+ SECTION`. Either all of it is written, or nothing.
set -eu
[ $# -gt 0 ] || { echo "usage: $0 SET-UP [PIECE...] > envoy.yaml" >&2; exit 2; }
for file; do
    [ -f "$file" ] && [ -s "$file" ] || { echo "$0: $file is no file, or an empty one" >&2; exit 2; }
done
setup=$1
shift
exec awk -v setup="$setup" '
    FNR == 1 { file++; name = FILENAME; section = "" }
    file < ARGC - 1 && /^[a-z_]+:$/ {
        section = $0
        sub(/:$/, "", section)
        from[section] = name
        begun[name, section] = 1
        next
    }
    file < ARGC - 1 && /^[ \t\r]*(#|$)/ { lines[section] = lines[section] $0 "\n"; next }
    file < ARGC - 1 && section == "" { refuse("line " FNR " belongs to no section") }
    file < ARGC - 1 { lines[section] = lines[section] $0 "\n"; filled[name] = filled[name, section] = 1; next }
    /^ *#\+ [a-z_]+$/ {
        place = $2
        indent = $0
        sub(/#.*/, "", indent)
        count = split(lines[place], put, "\n")
        for (i = 1; i < count; i++) out = out (put[i] == "" ? "" : indent put[i]) "\n"
        delete from[place]
        next
    }
    { out = out $0 "\n" }
    function refuse(what) { print name ": " what > "/dev/stderr"; failed = 1; exit 1 }
    END {
        if (failed) exit 1
        for (i = 1; i < ARGC - 1; i++) if (!(ARGV[i] in filled)) { name = ARGV[i]; refuse("nothing stands in it") }
        for (given in begun) if (!(given in filled)) {
            split(given, part, SUBSEP)
            name = part[1]
            refuse("nothing stands in its `" part[2] "`")
        }
        for (place in from) { name = from[place]; refuse(setup " has no place for `" place "`") }
        printf "%s", out
    }
' "$@" "$setup"
