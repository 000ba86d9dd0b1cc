"""How the operators of a block are split over the ranks of one mesh axis: rules, the program that picks, the rewrite.

placement     what a rank holds of a tensor, and how one form becomes another
rules         per ATen operator, which dims may be split and what that makes of its outputs
program       for a block class, the best rule of every operator; layouts along the blocks
loads         how evenly ranks are loaded by their experts
localize      a graph with the sizes of one rank and its collectives: what is priced is what is run
stored        shardings as a plan holds them, in words
"""
