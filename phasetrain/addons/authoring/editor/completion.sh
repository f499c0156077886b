# Completion of phasetrain, written by `phasetrain completion`; write it again when your parts change.

# Prints the candidates for a word, one per line.
# Usage: _phasetrain_list WORD [WORD_BEFORE ...]
_phasetrain_list() {
    # In zsh: split words and ignore patterns without a match, as bash does.
    [ -n "${ZSH_VERSION-}" ] && emulate -L sh
    local word="$1" command="" flags="" wanted="" takes_folder="" group one
    shift
    for one in "$@"; do
        one="${command:+$command:}$one"
        case " $_phasetrain_commands " in *" $one "*) command="$one" ;; esac
    done
    case "$command" in
@CASES@
    esac
    case "$word" in
        -*) wanted="$flags" ;;
        *=*) wanted="$_phasetrain_values" ;;
    esac
    # Options in a folder of the user.
    group="${word%%=*}"
    for one in "configs/$group/"*.yaml "conf/$group/"*.yaml; do
        if [ "$group" != "$word" ] && [ -e "$one" ]; then
            one="${one##*/}"
            wanted="$wanted $group=${one%.yaml}"
        fi
    done
    if [ -n "$takes_folder" ]; then
        for one in "$word"*/ runs/*/; do
            case " $wanted " in *" ${one%/} "*) continue ;; esac
            [ -e "${one}status.json" ] && wanted="$wanted ${one%/}"
        done
    fi
    set -f  # a value such as [flatten] is not a pattern for files; this runs in a subshell
    for one in $wanted; do
        case "$one" in "$word"*) printf '%s\n' "$one" ;; esac
    done
}
