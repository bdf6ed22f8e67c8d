"""Requests that an assistant answers with one of a phone's functions, generated from templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from llmaas_eval.tolerance.recall import EVENTS, PEOPLE, PLACES

__all__ = ["FUNCTIONS", "generate_request"]

FUNCTIONS: Mapping[str, Sequence[str]] = {
    "take a photo": (
        "Take a {ask} with the {side} camera.", "Can you capture a picture of the {thing}?",
        "I want to shoot a photo of {person} in high resolution.", "Snap a photo, please.",
        "How do I take a selfie?", "Use the {side} camera to photograph the {thing}.",
    ),
    "set timer alarm": (
        "Set an alarm for {time}.", "Wake me up at {time}.", "Start a timer for {number} minutes.",
        "I need a reminder alarm at {time} labeled '{event}'.", "Can you set a timer for the oven?",
        "How to create an alarm for {time} on {day}?",
    ),
    "change screen brightness": (
        "Make the screen {degree}.", "Set the brightness to level {number}.",
        "My display is too {shade}, can you change it?", "Lower the screen brightness to {number}.",
        "I need more brightness to read outside.", "How can I dim my display at night?",
    ),
    "create calendar event": (
        "Add the {event} to my calendar on {day} at {time}.",
        "Schedule a {event} with {person} from {time} to {time}.",
        "Put '{event}' in my calendar.", "Can you create an event called '{event}' for {day}?",
        "I want to plan a {event} in {place} on {day}.", "Book {day} {time} for the {event}.",
    ),
    "set volume": (
        "Set the {sound} volume to {number}.", "Turn the {sound} volume {way}.",
        "Make my {sound} louder.", "The {sound} is too loud, reduce it to {number}.",
        "How do I mute the {sound}?", "Can you raise the volume of the {sound} to maximum?",
    ),
    "connect to bluetooth device": (
        "Connect to my {device}.", "Pair my phone with the {device} over Bluetooth.",
        "Can you link the {device} within {number} seconds?", "Connect the Bluetooth {device}.",
        "I want to use my {device}, connect it.", "Try to reach '{device}' through Bluetooth.",
    ),
    "enable do not disturb": (
        "Turn on Do Not Disturb.", "I do not want any notifications during the {event}.",
        "Switch Do Not Disturb {switch}.", "Disable Do Not Disturb mode now.",
        "Silence all calls while I sleep.", "Can you activate Do Not Disturb until {time}?",
    ),
    "set nest temperature": (
        "Set the thermostat to {number} degrees.", "Make the house warmer, {number} degrees.",
        "Set my Nest to {number} degrees Celsius.", "It is cold, raise the temperature at home.",
        "Can the Nest thermostat be set to {number} Fahrenheit?", "Cool the living room down.",
    ),
    "play music on nest hub": (
        "Play {music} on the Nest Hub.", "Stream '{music}' from {service} on my Nest Audio.",
        "I want to listen to {music} on the speaker.", "Put on some {music} music.",
        "Can you play songs by {person} on my Nest Hub?",
        "Start my {music} playlist from {service}.",
    ),
    "play video on nest hub": (
        "Play a video about {topic} on the Nest Hub.", "Show the {topic} movie on my Nest Hub.",
        "Stream '{topic}' episodes from {films} on the Nest Hub.", "Watch {films} on the Hub.",
        "Can you display the newest {topic} video on the Nest Hub?",
        "Play the film on my Nest display.",
    ),
    "open or lock door": (
        "Lock the {door} door.", "Open the {door} door for {person}.",
        "Is the {door} door locked? If not, lock it.", "Unlock the {door} door.",
        "Close and lock all doors at {time}.", "Can you open the door with the smart lock?",
    ),
    "get trending news": (
        "What is the latest news about {topic}?", "Show me news on {topic} in {language}.",
        "Give me today's headlines from {place}.", "I want to read articles about {topic}.",
        "Find trending stories on {topic}.", "Get {number} news articles about {place}.",
    ),
    "irrelevant function": (
        "Order a pizza with cheese.", "Book a flight to {place}.",
        "Translate 'hello' to {language}.",
        "Buy tickets for the {event}.", "What is {number} times {number}?",
        "Install the {service} app.", "Tell me a joke about {topic}.",
        "Find a recipe for dinner.", "Turn on the lights in the kitchen.",
        "Pay my bill for {month}.",
    ),
    "get weather forecast": (
        "Will it rain in {place} on {day}?", "What is the weather in {place}?",
        "Give me the forecast of {place} for {number} days.", "How warm will it be on {day}?",
        "Do I need an umbrella in {place} this week?", "Check the weather for my trip to {place}.",
    ),
    "send email": (
        "Send an email to {person} about the {event}.", "Mail {address} with the title '{event}'.",
        "Write an email to {address} with the content '{words}'.", "Email {person} '{words}'.",
        "Can you send a mail with the subject '{topic}'?", "Compose an email for {address}.",
    ),
    "search youtube videos": (
        "Search YouTube for {topic}.", "Find videos about {topic} on YouTube.",
        "Look for {music} videos on YouTube.", "Show me YouTube tutorials on {topic}.",
        "Can you search for clips of {topic}?", "I want to find YouTube videos by {person}.",
    ),
    "find route google maps": (
        "How do I get from {place} to {place}?", "Find a {travel} route to {place}.",
        "Show the way to the {event} on Google Maps.",
        "Directions from {place} to {place}, please.",
        "What is the fastest {travel} way to the airport of {place}?", "Navigate to {place}.",
    ),
    "check nest smoke detector status": (
        "Is my smoke detector working?", "Check the battery of the Nest smoke detector.",
        "What is the status of the smoke alarm in the {room}?", "Does the smoke detector work?",
        "Tell me if the Nest Protect in the {room} is fine.",
        "When was the smoke alarm last tested?",
    ),
    "send text message": (
        "Text {person} '{words}'.", "Send a message to {person}: {words}",
        "Tell {person} by text that I am late.", "Send an SMS to {phone}.",
        "Can you message {person} about the {event}?", "Write a text to {person} saying '{words}'.",
    ),
    "make phone call": (
        "Call {person}.", "Dial {phone}.", "Make a phone call to {person}.",
        "Can you ring {person} in {place}?", "I need to call the number {phone}.",
        "Place an international call to {phone}.",
    ),
    "create contact": (
        "Add {person} to my contacts with the number {phone}.", "Save {phone} as {person}.",
        "Create a contact named {person}.", "Store {person}'s number {phone}.",
        "I want a new contact for my {role} {person}.", "Add a new entry for {person}, {address}.",
    ),
}  # fmt: skip
"""Templates of requests by function."""

_SLOTS: Mapping[str, str] = {
    "ask": "photo,picture,selfie,quick photo,wide photo",
    "side": "front,back,rear,main",
    "thing": "sunset,garden,whiteboard,dog,dinner,family,city,mountain,document",
    "day": "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday,tomorrow",
    "degree": "brighter,darker,as bright as possible,less bright",
    "shade": "bright,dark,dim",
    "sound": "ring,media,alarm,music,ringtone",
    "way": "up,down,off",
    "device": "headphones,speaker,car,keyboard,watch,earbuds,tablet,headset,printer",
    "switch": "on,off",
    "music": "jazz,rock,classical,relaxing piano,workout,pop hits,country,blues",
    "service": "Spotify,Apple Music,Pandora,YouTube Music,Deezer",
    "films": "Netflix,YouTube,Disney,Hulu",
    "topic": "football,cooking,climate change,technology,yoga,space,history,travel,gardening,"
    "business,dogs,science,politics,guitar lessons",
    "language": "English,Spanish,French,German,Chinese,Italian",
    "door": "front,back,garage,kitchen,cellar",
    "month": "January,March,May,July,October",
    "address": "anna@example.com,info@example.org,boss@example.com,team@example.net",
    "words": "I am on my way,Happy birthday!,See you soon,The report is ready,Thank you so much",
    "travel": "driving,walking,cycling,bus",
    "room": "kitchen,bedroom,hall,living room",
    "phone": "+14155550123,555-0188,+442079460018,+4930123456",
    "role": "boss,doctor,neighbor,sister,teacher",
}
"""Words of each slot, separated by commas."""


def generate_request(random: Random, function: str) -> str:
    """Return a request for a function."""
    words = {name: random.choice(each.split(",")) for name, each in _SLOTS.items()}
    words |= {
        "person": random.choice(PEOPLE),
        "place": random.choice(PLACES),
        "event": random.choice(EVENTS),
        "number": str(random.randrange(1, 80)),
        "time": f"{random.randrange(1, 13)}:{random.randrange(0, 60, 5):02}",
    }
    return random.choice(FUNCTIONS[function]).format_map(words)
