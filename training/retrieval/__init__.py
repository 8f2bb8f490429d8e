"""What a retrieval method is given, how its options are chosen, and how scores become answers: the same for trees and baselines."""
