"""Rank functions for the second stage: choice by elimination (NCE) and Plackett–Luce over linear functions and highway networks."""
