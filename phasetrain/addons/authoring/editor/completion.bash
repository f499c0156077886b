
_phasetrain() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##* }
    local before=(${line% *}) found
    # `=` separates words in bash: the key in front of it is completed with the value.
    local prefix=${word%"${COMP_WORDS[COMP_CWORD]#=}"}
    COMPREPLY=()
    while IFS= read -r found; do
        COMPREPLY+=("${found#"$prefix"}")
    done < <(_phasetrain_list "$word" "${before[@]:1}")
    # A value ends the word; a key is followed by its value.
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} != *= ]]; then
        compopt +o nospace 2> /dev/null
    fi
}
complete -o default -o nospace -F _phasetrain phasetrain
