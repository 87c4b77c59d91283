"""What classes of every published generation need from the modular kernel."""
