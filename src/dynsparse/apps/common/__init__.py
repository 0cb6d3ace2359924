"""What every complete training shares, whatever it trains on."""
