"""Tasks and fitted methods, the choice of options, and the way from scores to answers: the same for trees and baselines."""
