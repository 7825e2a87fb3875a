"""The recurrences themselves, token by token in f64: what every kernel here is compared with.

Per head the state S is a K by V matrix and l, at most 0, the log of the decay: one number per head
(GDN) or one per key channel (KDA, RWKV6).

    GDN, KDA   S~ = exp(l) S,  u = beta (v - k S~),  S' = S~ + k^T u,  o = q S'
    RWKV6      o = q S + (q . (bonus k)) v,          S' = exp(l) S + k^T v

Sources: arXiv 2412.06464 (GDN), 2510.26692 (KDA), 2404.05892 (RWKV6).
"""

from __future__ import annotations

import torch


def recurrence(mechanism, tokens: list, state: torch.Tensor):
    """Runs `tokens`, each a `kernels.Token`, from `state` [B, H, K, V].

    Gives the outputs [T, B, H, V] and the last state, both in f64.
    """
    state = state.to(torch.float64)
    outputs = []
    for token in tokens:
        q, k, v, decay = (x.to(torch.float64) for x in (token.q, token.k, token.v, token.decay))
        alpha = decay.exp()
        alpha = alpha[..., :, None] if mechanism.channel else alpha[..., None, None]
        if mechanism.delta:
            decayed = alpha * state
            prediction = torch.einsum("bhk,bhkv->bhv", k, decayed)
            update = token.beta.to(torch.float64)[..., None] * (v - prediction)
            state = decayed + torch.einsum("bhk,bhv->bhkv", k, update)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q, state))
        else:
            bonus = token.bonus.to(torch.float64)[None]
            own = (q * bonus * k).sum(-1, keepdim=True)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q, state) + own * v)
            state = alpha * state + torch.einsum("bhk,bhv->bhkv", k, v)
    return torch.stack(outputs), state
