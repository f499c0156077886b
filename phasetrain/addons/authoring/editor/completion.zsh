
_phasetrain() {
    local -a found
    found=("${(@f)$(_phasetrain_list "$PREFIX" "${(@)words[2,CURRENT-1]}")}")
    found=(${(u)found:#})
    if (( ! $#found )); then
        _files
        return
    fi
    # A value ends the word; a key is followed by its value.
    compadd -S '' -- ${(M)found:#*=}
    compadd -- ${found:#*=}
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -u; }
compdef _phasetrain phasetrain
