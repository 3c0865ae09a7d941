"""The exercise on theory, answered by short formulas."""

# %% [markdown]
# # Attention in your own words
#
# Replace each "?" by a short formula, as you would write it on paper, and run the cell: the check
# says ✓, or what is wrong. It does not matter how a formula is written: it is evaluated.
#
# | write | for |
# |---|---|
# | `inf` or `∞` | infinity |
# | `n_q n_k`, `n_q * n_k` | a product of numbers |
# | `d**2`, `d^2`, `d²`, `sqrt(d)`, `√d` | powers and roots |
# | `K.T @ Q` | a product of matrices, the first transposed |
# | `softargmax(…)`, `softmax(…)` | along the columns, along the rows |

# %%
from regard.lab.answers.architecture import architecture
from regard.lab.answers.figure import Drawn
from regard.lab.answers.plots import heat_map, moving_key
from regard.lab.exercises import words as check

# %% [markdown]
# ## 1. Temperature
#
# $a = \operatorname{softargmax}(\beta K^\top q)$. What does $\beta$ go to, so that attention copies
# the value of the best key? And what, so that it mixes all values evenly?

# %%
cold = "inf"  # fill: β → ? to copy one value
check.cold(cold)

hot = "0"  # fill: β → ? to mix all values evenly
check.hot(hot)

# %% [markdown]
# There are $n$ queries and $m$ keys; keys have width $d$, values width $t$. How large is each
# weight at $\beta = 0$? Which $\beta$ is usual?

# %%
even = "1/m"  # fill: each weight at β = 0, in n, m, t
check.even(even)

convenient = "1/sqrt(d)"  # fill: the usual β, in d, t
check.convenient(convenient)

# %% [markdown]
# ## 2. Matrices
#
# Vectors are columns: $Q$ is $d \times n$, $K$ is $d \times m$, $V$ is $t \times m$. What is the
# output $H$?

# %%
output = "V @ softargmax(beta * K.T @ Q)"  # fill: H, in Q, K, V, beta
check.output(output)

# %% [markdown]
# $H = V A$. Which $A$ keeps every value in its place? You may use `I` (the identity), `ones` (all
# entries 1) and `n`.

# %%
keeping = "I"  # fill: A, in I, ones, n
check.identity(keeping)

# %% [markdown]
# The columns of $K$ are orthonormal, $P$ is a permutation matrix, `beta` is a large number. Which
# queries give $H = V P$?

# %%
permuting = "beta * K @ P"  # fill: Q, in K, P, beta
check.permuting(permuting)

# %% [markdown]
# The values are $W X$, and $A = I$: a linear layer that runs over the columns. What is $H$?

# %%
running = "W @ X"  # fill: H, in W, X
check.running(running)

# %% [markdown]
# ## 3. A key moves
#
# One key's score changes by a small $\delta$. Its weight is $a$, its value $v$, the output $h$. How
# far does $h$ move, to first order?

# %%
moved = "beta * a * delta * (v - h)"  # fill: the change of h, in beta, a, delta, v, h
check.moved(moved)

# %% [markdown]
# ## 4. The mask
#
# What is added to the score of a key that comes later than its query?

# %%
masked = "-inf"  # fill: the mask above the diagonal
check.masked(masked)

# %% [markdown]
# ## 5. Counting
#
# $Q$ is $n_q \times d_k$, $K$ is $n_k \times d_k$, $V$ is $n_k \times d_v$. How many
# multiplications do $Q K^\top$ and $A V$ take together? How many additions does $Q K^\top$ take?

# %%
multiplications = "n_q * n_k * (d_k + d_v)"  # fill: in n_q, n_k, d_k, d_v
check.multiplications(multiplications)

additions = "n_q * n_k * (d_k - 1)"  # fill: of Q Kᵀ alone, in n_q, n_k, d_k
check.additions(additions)

# %% [markdown]
# How many parameters has self-attention of width $d$ with $h$ heads, without biases? How many
# multiplications has a convolution of kernel $k$ over $n$ positions, from $d$ channels to $d$?

# %%
parameters = "4 * d**2"  # fill: in d, h
check.parameters(parameters)

convolution = "k * n * d**2"  # fill: in k, n, d
check.convolution(convolution)

# %% [markdown]
# ## 6. Look at it
#
# One key moves along the query. The output slides on the straight line between that key's value and
# the mean of the others: that is why the change above points along $v - h$.

# %%
Drawn(moving_key())

# %% [markdown]
# Attention sees no order, so that positions are added to the tokens:

# %%
Drawn(heat_map())

# %% [markdown]
# And this is where each kind of attention stands in the Transformer:

# %%
Drawn(architecture())
