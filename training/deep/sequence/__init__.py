"""Models that read a history as a sequence and predict the next item at every position: encoder, batches, softmax, training step.

The baseline SASRec is made of the same encoder, batches and softmax.
"""
